"""Prometheus metrics of a server: a table of them, and what records it."""
