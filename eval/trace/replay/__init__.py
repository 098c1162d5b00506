"""``continuum trace replay``: the same decisions once more, or what another policy would have decided."""
