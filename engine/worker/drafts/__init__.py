"""Drafters that have weights: they run behind a step's sampling, and draft tokens for the next step."""
