"""``continuum trace report``: a trace as one HTML page that needs nothing else. Knows no engine."""
