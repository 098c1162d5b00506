"""Models that read pictures: the encoder, and how its outputs take the places of tokens."""
