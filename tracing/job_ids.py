"""How jobs are called in a trace, and by whoever writes one."""

import re

INFERRED = "inferred-"
"""How the id of a job begins that nobody named; before it may stand whose API key it came with."""

_INFERRED_ID = re.compile(rf"(?:[A-Za-z0-9_.-]{{1,64}}:)?{INFERRED}")


def may_be_inferred(job_id: str) -> bool:
    """Whether an id was made for a job that nobody named, or looks so."""
    return _INFERRED_ID.match(job_id) is not None
