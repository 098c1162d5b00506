"""What a scheduler's trace says of jobs, pins and the pool. Knows the trace's records and no engine."""
