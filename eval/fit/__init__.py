"""``continuum fit``: how many agents a GPU serves, before there is one."""
