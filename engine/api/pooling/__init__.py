"""The endpoints of pooling models: embeddings, classes, scores and ranks."""
