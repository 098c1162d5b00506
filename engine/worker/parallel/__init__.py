"""Tensor, pipeline and expert parallelism: several processes compute one model, each with its part."""
