"""``continuum trace``: what a scheduler's trace tells, and what another policy would have made of it."""
