"""What a machine needs that has nothing but a package index, and what the distributions hold."""
