"""Formats between tags of their own, one small class for each family."""
