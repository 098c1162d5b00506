"""From a model folder to a model: configuration, checkpoints, parts for ranks."""
