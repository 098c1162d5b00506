"""Models that run a flattened batch of sequences over a paged KV cache."""
