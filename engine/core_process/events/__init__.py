"""Publishes what enters and leaves the prefix cache, and changes of pins."""
