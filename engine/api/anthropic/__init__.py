"""Anthropic's Messages API: another format for the same turn of a conversation."""
