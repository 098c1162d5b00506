"""Drafters that have weights: they run after a step's sampling, and draft tokens for the next step."""
