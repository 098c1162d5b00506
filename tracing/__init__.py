"""The scheduler's trace: events, writer and reader. This package imports nothing else of this project."""
