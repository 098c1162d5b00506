"""HTTP below the endpoints: connections, API keys, limits of time and size, event streams.
Independent of any API."""
