"""The GPU path in one call: is every kernel right, is every token that of transformers, and how far is each
step from what the device's own copy and matmul rates allow."""
