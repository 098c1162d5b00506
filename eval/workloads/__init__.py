"""Jobs to replay: recorded by others, or synthetic, made from a seed. Knows nothing of servers."""
