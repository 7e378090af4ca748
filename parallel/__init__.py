"""Process layout and tensor movement: no model, no RL."""
