"""KV blocks on their way between servers: computed by one, fetched by the other over TCP."""
