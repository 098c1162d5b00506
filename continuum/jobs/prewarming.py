"""Requests that compute a part of a job's next turn while its tools run: results that came early.

Such a request is no turn. It ends no tool call, teaches nobody how long tools take, and waits behind all
others. What it has computed is held with what its job's last turn left.
"""

from __future__ import annotations

from collections.abc import Iterator

from continuum.jobs.job import BranchTip
from continuum.jobs.registry import JobRegistry
from engine.core.policy import PolicyContext
from engine.core.request import Request
from engine.records.priority import MAX_PRIORITY

LAST_OF_ALL = MAX_PRIORITY
"""The priority of these requests."""


class Prewarming:
    """The requests that run ahead of a turn, and the branch tip of each."""

    def __init__(self, jobs: JobRegistry, context: PolicyContext) -> None:
        self._jobs = jobs
        self._block_size = context.block_size
        self._blocks_of_pin = context.blocks_of_pin
        self._tips: dict[str, BranchTip] = {}

    def takes(self, request: Request, now: float) -> bool:
        """Whether the request runs ahead of a turn: its client says so, and its prompt goes on from a branch
        of a job. If so, it becomes the last of all."""
        if request.job is None or not request.job.prewarms:
            return False
        tip = self._jobs.tip_before(request, self._block_size)
        if tip is None:
            return False
        self._tips[request.request_id] = tip
        self._jobs.touch(tip.job, now)
        request.priority = max(request.priority, LAST_OF_ALL)
        return True

    def has(self, request: Request) -> bool:
        return request.request_id in self._tips

    def fits(self, request: Request, num_free_blocks: int) -> bool:
        """Whether the request gets all of its blocks from those that are free, so that it takes none that
        others hold."""
        pin = self._tips[request.request_id].pin
        num_wanted = self._blocks_of_pin(-(-request.num_tokens // self._block_size))
        return num_wanted - (0 if pin is None else pin.num_blocks) <= num_free_blocks

    def tip_of(self, request: Request) -> BranchTip | None:
        """The tip that the request goes on from; None for other requests, and once no turn may do so, too."""
        tip = self._tips.get(request.request_id)
        return tip if tip is not None and tip in tip.job.tips and not tip.is_superseded else None

    def gone(self, request: Request) -> None:
        """Forgets a request that has ended, whether it is known or not."""
        self._tips.pop(request.request_id, None)

    def ahead_of(self, tip: BranchTip) -> Iterator[str]:
        """The ids of the requests that run ahead of the turn that continues a tip."""
        return (request_id for request_id, each in self._tips.items() if each is tip)
