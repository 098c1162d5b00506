"""Models that run a flattened batch of sequences on a paged KV."""
