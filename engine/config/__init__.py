"""The records of options, one module for each section of the flags, and their checks."""
