"""KV that moves between servers: its configuration, and the messages of requests and servers."""
