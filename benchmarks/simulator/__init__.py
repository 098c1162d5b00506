"""Compares the simulator with the served engine."""
