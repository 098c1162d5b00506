"""Jobs to replay: recorded by others, or made here from a seed. Knows nothing of servers."""
