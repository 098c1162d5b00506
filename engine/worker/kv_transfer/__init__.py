"""Moves KV blocks between servers: over TCP, from memory to memory, or through a shared folder."""
