"""Measures the engine on CPUs over HTTP, with models made for it, in tokens per second and milliseconds:
alone, or compared with other servers that do the same work in the same run."""
