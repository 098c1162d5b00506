"""Blocks of the KV cache: their hashes, the pool, who holds which, and the prefix cache."""
