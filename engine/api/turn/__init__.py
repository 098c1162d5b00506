"""One turn, from a conversation to its parsed reply; the same for each API."""
