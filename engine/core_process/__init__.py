"""The engine core's process: its loop, its sockets, how it is started, and its clients."""
