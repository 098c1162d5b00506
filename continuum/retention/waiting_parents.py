"""Jobs that wait for their sub-agents: these tell better than the tool's curve when the next turn comes."""

from __future__ import annotations

from continuum.jobs.job import BranchTip, Job

LOOK_S = 2.0
"""How often it is looked whether a sub-agent is still at work."""
SOON_S = 2.0
"""The turn is expected within this time after the last sub-agent has answered."""


def num_at_work(tip: BranchTip, now: float) -> int:
    """How many of a job's sub-agents run, wait, or call tools themselves, or have answered just now. 0 for a
    tip that its job went on without."""
    if tip.is_superseded:
        return 0
    return sum(_is_at_work(child, now) for child in tip.job.children)


def _is_at_work(job: Job, now: float) -> bool:
    waits = any(tip.pin is not None and not tip.is_at_rest for tip in job.tips)
    return bool(job.turns) or waits or now - job.last_active_s < SOON_S
