"""Publishes what enters and leaves the prefix cache, and what pins do."""
