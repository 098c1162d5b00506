"""Embeddings, classes and scores instead of text: parameters of requests and properties of models."""
