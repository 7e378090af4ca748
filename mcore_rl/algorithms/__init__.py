"""Algorithms of mcore_rl."""
