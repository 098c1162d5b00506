"""The server's processes: one, or several API server processes before one engine core."""
