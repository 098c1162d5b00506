"""Measures the cost of a trace."""
