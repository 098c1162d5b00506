"""``continuum trace``: analyses a scheduler's trace, and replays it under its own or another policy."""
