"""Looking on while the engine runs: what is shown of steps, jobs, pins and blocks. No HTTP, no sockets."""
