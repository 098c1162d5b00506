"""Attacks on a running server, each a command with figures: ``python -m tests.reliability.NAME``."""
