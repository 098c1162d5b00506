"""A trace in the formats of other programs. Each module knows its format only."""
