"""Measures the cost of HTTP, the API server and busy cores."""
