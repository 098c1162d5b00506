"""What the core writes into a trace: its inputs, its steps, and the header."""
