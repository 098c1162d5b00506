"""A simulator that runs the real scheduler and the real policies; only the model's time is computed."""
