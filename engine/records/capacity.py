"""How many more jobs an engine can take on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

NEGLIGIBLE = 1e-3
"""Blocks that a job is expected to need at a time at which hardly any lasts so long."""


class Capacity(msgspec.Struct, kw_only=True):
    """What begun jobs are expected to need of the KV cache, and how many more fit beside them. Needs are in
    KV blocks, now and at each of the later times of ``ahead_s``."""

    object: Literal["capacity"] = "capacity"
    jobs_that_fit: int | None
    """How many more jobs like the recent ones may begin now; None before any job began."""
    waiting_jobs: int
    """New jobs that wait until they fit."""
    usable_blocks: int
    """Blocks that the contexts of begun jobs may take: of the host tier if there is one, else of the pool."""
    ahead_s: list[float]
    """How many seconds ahead each need is expected."""
    needed_blocks: list[int]
    """What begun jobs need at these times."""
    usual_blocks: list[float] | None
    """What a job needs that begins now, on average over recent ones; None before any job began."""


def num_that_fit(
    usable_blocks: int, needed_blocks: Sequence[int], usual_blocks: Sequence[float] | None
) -> int | None:
    """How many jobs of the usual need fit at all times; None if that is not known. A need below
    ``NEGLIGIBLE`` blocks limits nothing."""
    both = zip(needed_blocks, usual_blocks or [0.0] * len(needed_blocks), strict=True)
    fits = [(usable_blocks - begun) / own for begun, own in both if own >= NEGLIGIBLE]
    return max(0, int(min(fits))) if fits else None


def merged(cores: Sequence[Capacity]) -> Capacity:
    """The capacity of a group. On a core on which no job has begun yet, jobs are like those of the
    others."""
    known = [core.usual_blocks for core in cores if core.usual_blocks is not None]
    usual = [sum(column) / len(known) for column in zip(*known, strict=True)] if known else None
    fits = [
        num_that_fit(core.usable_blocks, core.needed_blocks, core.usual_blocks or usual) for core in cores
    ]
    return Capacity(
        jobs_that_fit=None if all(each is None for each in fits) else sum(each or 0 for each in fits),
        waiting_jobs=sum(core.waiting_jobs for core in cores),
        usable_blocks=sum(core.usable_blocks for core in cores),
        ahead_s=[max(column) for column in zip(*(core.ahead_s for core in cores), strict=True)],
        needed_blocks=[sum(column) for column in zip(*(core.needed_blocks for core in cores), strict=True)],
        usual_blocks=usual,
    )
