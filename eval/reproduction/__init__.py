"""The Continuum paper's settings, run again in simulation and set beside what it published."""
