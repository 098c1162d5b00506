"""Learning from past jobs: produces the state that a server starts with."""
