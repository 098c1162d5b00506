"""The load generator: replays jobs against a server over HTTP and records the results."""
