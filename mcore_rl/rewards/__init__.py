"""Rewards of mcore_rl."""
