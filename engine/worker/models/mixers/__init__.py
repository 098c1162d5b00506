"""Modules that mix the tokens of a sequence in a layer: attention, or one with a state instead."""
