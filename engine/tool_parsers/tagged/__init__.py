"""Formats with calls between tags, one small class for each family."""
