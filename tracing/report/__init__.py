"""``continuum trace report``: a trace as one HTML page that needs nothing else. Knows nothing of the engine."""
