"""Learning from jobs of the past: what a server then begins with."""
