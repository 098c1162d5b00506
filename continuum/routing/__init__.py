"""Chooses the engine core of a turn: the home of its job."""
