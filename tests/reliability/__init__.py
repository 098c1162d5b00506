"""Attacks on a running server, each a command that prints figures: ``python -m tests.reliability.NAME``."""
