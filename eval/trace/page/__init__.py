"""``continuum trace report``: a trace as one self-contained HTML page. Knows no engine."""
