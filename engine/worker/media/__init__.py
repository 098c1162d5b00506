"""Models that read pictures or audio: the encoders, and how their outputs replace embeddings of tokens."""
