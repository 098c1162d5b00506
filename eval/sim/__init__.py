"""A simulator that runs the real scheduler and policies; only the model's step times are computed."""
