"""Models that read pictures: the encoder, and how its outputs replace embeddings of tokens."""
