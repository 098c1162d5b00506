"""KV that moves between servers: what is configured, what requests say, and what servers say of it."""
