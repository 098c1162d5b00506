"""The project's laboratory: measurements of its own parts. Not in the wheel; run from a clone."""
