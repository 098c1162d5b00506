"""What the policy learns: durations of tools and gaps, accuracy of hints, lengths of jobs, cost of KV."""
