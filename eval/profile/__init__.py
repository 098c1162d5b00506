"""``continuum profile``: step times of a model on this machine, for the simulator."""
