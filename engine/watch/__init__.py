"""Live views of the running engine: steps, jobs, pins and blocks. No HTTP, no sockets."""
