"""Data of mcore_rl."""
