"""Measures the cost of the scheduler alone, and compares it with vLLM's."""
