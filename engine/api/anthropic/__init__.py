"""Anthropic's Messages API: its own format around the same turn of a conversation."""
