"""Ids of jobs in a trace."""

import re

INFERRED = "inferred-"
"""Prefix of the ids of inferred jobs; the name of the API key may come before it."""

_INFERRED_ID = re.compile(rf"(?:[A-Za-z0-9_.-]{{1,64}}:)?{INFERRED}")


def may_be_inferred(job_id: str) -> bool:
    """Whether an id belongs to an inferred job, or looks like one."""
    return _INFERRED_ID.match(job_id) is not None
