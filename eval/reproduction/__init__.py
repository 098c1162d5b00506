"""Simulates the Continuum paper's settings and compares the results with the published ones."""
