"""Structured output: JSON of a schema, a regular expression, a choice, or the client's own grammar."""
