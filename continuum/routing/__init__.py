"""Which engine core runs a turn: jobs at home."""
