"""Live agents: tools in a sandbox, and the loop between a model and its tools."""
