"""Rollout of mcore_rl."""
