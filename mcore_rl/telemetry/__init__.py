"""Telemetry of mcore_rl."""
