"""Sync of mcore_rl."""
