"""Checks the GPU path in one call: whether every kernel is right, whether every token is that of
transformers, and how close each step is to the limit set by the device's own copy and matmul rates."""
