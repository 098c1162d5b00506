"""Estimates how long tool calls take: tool keys, survival curves, and a state that survives a restart."""
