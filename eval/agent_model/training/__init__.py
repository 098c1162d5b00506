"""How the bundled model was made: its tasks, its network and its training."""
