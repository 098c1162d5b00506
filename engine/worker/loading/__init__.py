"""Loads a model from a folder: configuration, checkpoints, parts for ranks."""
