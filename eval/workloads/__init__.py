"""Jobs to replay: recorded, or synthetic and made from a seed. Knows nothing of servers."""
