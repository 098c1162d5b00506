"""What is learned: tools, gaps, hints, programs, work to come, the cost of KV."""
