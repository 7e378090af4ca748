"""Hugging Face checkpoints as Megatron-Core modules and back: no RL."""
