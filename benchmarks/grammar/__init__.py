"""Measures the cost of grammars per token."""
