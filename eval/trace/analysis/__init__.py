"""Analysis of a scheduler's trace: jobs, pins and the pool. Knows the trace's records and no engine."""
