"""``continuum demo``: the same jobs under two policies, side by side."""
