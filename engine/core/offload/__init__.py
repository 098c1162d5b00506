"""KV blocks outside the pool: the host and disk tiers' indexes, and the loads under way."""
