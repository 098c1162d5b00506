"""Installation on a machine that has only a package index, and the contents of the distributions."""
