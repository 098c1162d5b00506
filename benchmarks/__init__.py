"""Measurements of the project's own components. Not in the wheel; run from a clone."""
