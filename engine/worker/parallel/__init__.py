"""One model computed by several processes, each with its part of every weight (tensor parallelism)."""
