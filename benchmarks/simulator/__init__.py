"""The simulator against the served engine."""
