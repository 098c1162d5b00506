"""How jobs are called in a trace, and by whoever writes one."""

INFERRED = "inferred-"
"""How the id of a job begins that nobody named."""
