"""Converts a request's messages to the tokens of its prompt."""
