"""Embeddings, classes and scores instead of text: what a request asks for and what a model has."""
