"""Formats whose response is several messages: reasoning, calls and the answer, each with a head."""
