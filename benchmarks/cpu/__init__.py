"""The engine on CPUs: what it does with models made for it, in tokens per second and milliseconds, over HTTP,
alone or beside servers of other makes on the same work in the same run."""
