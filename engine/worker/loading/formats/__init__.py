"""The formats in which checkpoints store weights: plain, or in fewer bits with scales. Knows no model."""
