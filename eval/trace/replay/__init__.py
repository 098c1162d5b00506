"""``continuum trace replay``: repeats the decisions of a trace, or simulates another policy's."""
