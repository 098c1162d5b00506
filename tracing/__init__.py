"""The scheduler's trace: events, writer and reader. Imports nothing else of this project."""
