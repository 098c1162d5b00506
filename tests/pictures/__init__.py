"""Models that read pictures, held to transformers."""
