"""The server's processes: one, or several API server processes for one engine core."""
