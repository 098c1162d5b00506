"""Tensor parallelism: one model computed by several processes, each with its part of every weight."""
