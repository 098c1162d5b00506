"""The life of a branch of a job's conversation, from the end of one turn to the next turn, or until it is
dropped.

Only this module opens, continues, restores, supersedes or drops a branch. Each event goes to all listeners in
the given order: the registry first, because others query it for a job's branches; the trace last.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from continuum.jobs.continuation import left_behind_by, prompt_tail
from continuum.jobs.job import MAX_TIPS, BranchTip, Job, Turn
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.records.block_chain import BlockChain
from engine.records.messages import ToolSignal, TurnReceipt


class BranchEnd(Enum):
    """Why a branch was dropped."""

    JOB_DONE = auto()
    """No turn follows: its job has ended."""
    JOB_FORGOTTEN = auto()
    """Its job was idle for too long, or was the longest idle one beyond the maximum number."""
    CROWDED_OUT = auto()
    """Its job has more branches than the policy remembers."""


class BranchListener:
    """Receives the events of branches and their jobs; the default methods do nothing."""

    def on_opened(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> None:
        """Called when a turn ended and the conversation may continue from here. ``block_hashes`` are those of
        its full blocks."""

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        """Called when it is known which tools run, or that none does: see ``tip.tools``."""

    def on_hint(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        """Called when the client gave a hint about the tip's tools."""

    def on_prewarmed(self, tip: BranchTip, request: Request, now: float) -> None:
        """Called when a request has computed more of the next turn's prompt: ``tip.ahead``."""

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        """Called when ``turn`` has arrived and replaces the tip."""

    def on_restored(self, tip: BranchTip, now: float) -> None:
        """Called when the turn that had continued the tip was given up: another turn may continue it."""

    def on_superseded(self, tip: BranchTip, turn: Turn, num_shared_blocks: int, now: float) -> None:
        """Called when the job went on without the tip: the prompt of ``turn`` shares only this many blocks
        with it. A turn may still continue the tip, but none is expected to."""

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        """Called when no turn will continue the tip."""

    def on_job_done(self, job: Job, now: float) -> None:
        """Called when no new turn of the job will come. Its running turns may still end."""

    def on_job_gone(self, job: Job, now: float) -> None:
        """Called when the job is no longer remembered: it was done (``job.is_finished``) or is forgotten."""


class Branches:
    """Opens, continues, restores, supersedes and drops branches, and ends their jobs."""

    def __init__(self, block_size: int, listeners: Sequence[BranchListener]) -> None:
        self._block_size = block_size
        self._listeners = tuple(listeners)
        self._ended: dict[str, BranchTip] = {}
        """Tips of turns that ended and may still get a signal, by request id."""

    def ended_at(self, request_id: str) -> BranchTip | None:
        """The tip of a turn that ended; None if it was continued or dropped, or is unknown."""
        return self._ended.get(request_id)

    def open(self, turn: Turn, receipt: TurnReceipt, now: float) -> BranchTip:
        """Opens the branch of a turn that has ended, and returns its tip."""
        request = turn.request
        job = turn.job
        block_hashes = request.block_hashes[: request.num_computed_tokens // self._block_size]
        tip = BranchTip(
            job,
            request.request_id,
            turn.number,
            BlockChain(block_hashes, None if turn.tip is None else turn.tip.chain),
            request.num_prompt_tokens,
            ended_s=now,
            place=job.place,
            receipt=receipt,
            external_id=request.external_id,
            prompt_tail=prompt_tail(request, self._block_size),
            num_replies=request.job.num_replies if request.job is not None else None,
            num_results=request.job.num_results if request.job is not None else None,
            asked_ttl_s=request.job.asked_ttl_s if request.job is not None else None,
            num_output_tokens=request.num_output_tokens,
            num_task_tokens=turn.num_task_tokens,
        )
        self._ended[request.request_id] = tip
        for listener in self._listeners:
            listener.on_opened(tip, block_hashes, now)
        if len(job.tips) > MAX_TIPS:
            oldest = next((each for each in job.tips if each.pin is None), job.tips[0])
            self._drop(oldest, BranchEnd.CROWDED_OUT, now)
        return tip

    def take_up(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> None:
        """Opens the branch of a turn that another core has run."""
        self._ended[tip.request_id] = tip
        for listener in self._listeners:
            listener.on_opened(tip, block_hashes, now)

    def tools_known(self, tip: BranchTip, now: float) -> None:
        for listener in self._listeners:
            listener.on_tools_known(tip, now)

    def hinted(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        for listener in self._listeners:
            listener.on_hint(tip, signal, now)

    def prewarmed(self, tip: BranchTip, request: Request, now: float) -> None:
        """Notes what a request has computed of the next turn's prompt, and what it found."""
        block_hashes = request.block_hashes[: request.num_computed_tokens // self._block_size]
        before = [chain.num_shared(block_hashes) for chain in (tip.chain, tip.ahead) if chain is not None]
        num_found_tokens = request.num_cached_tokens or 0
        if num_found_tokens + self._block_size >= request.num_prompt_tokens:
            num_found_tokens = request.num_prompt_tokens  # the last block is computed even if it is cached
        tip.num_found_tokens += max(0, num_found_tokens - max(before) * self._block_size)
        tip.ahead = BlockChain(block_hashes, tip.chain)
        for listener in self._listeners:
            listener.on_prewarmed(tip, request, now)

    def continue_(self, tip: BranchTip, turn: Turn, now: float) -> None:
        """Replaces the tip by the turn, which takes over the tip's pin when it is admitted."""
        turn.gap_s = max(0.0, turn.request.arrival_time - tip.ended_s)
        self._ended.pop(tip.request_id, None)
        for listener in self._listeners:
            listener.on_continued(tip, turn, now)
        if tip.is_superseded:
            tip.is_superseded = False
            turn.job.has_come_back = True

    def restore(self, tip: BranchTip, now: float) -> None:
        """Restores the tip, because the turn that had continued it was given up."""
        for listener in self._listeners:
            listener.on_restored(tip, now)

    def supersede_by(self, turn: Turn, now: float) -> None:
        """Finds the branch that the job abandons with this turn, which begins a branch, and supersedes it.

        If a job did return to such a branch, it keeps several conversations, and none of its branches is
        superseded again.
        """
        job = turn.job
        left = None if job.has_come_back else left_behind_by(job.tips, turn.request, self._block_size)
        if left is None:
            return
        if left.same_task:
            turn.num_task_tokens = left.tip.num_task_tokens
        for listener in self._listeners:
            listener.on_superseded(left.tip, turn, left.num_shared_blocks, now)

    def _drop(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        self._ended.pop(tip.request_id, None)
        for listener in self._listeners:
            listener.on_dropped(tip, end, now)

    # ---- jobs end ----

    def finish_job(self, job: Job, now: float) -> None:
        """Drops all branches of a job that gets no new turn, and of the jobs that it waited for; its running
        turns open none when they end."""
        is_news = not job.is_finished
        job.is_finished = True
        for child in list(job.children):
            self.finish_job(child, now)
        for tip in list(job.tips):
            self._drop(tip, BranchEnd.JOB_DONE, now)
        if not job.turns:
            self._job_gone(job, now)
        if is_news:
            for listener in self._listeners:
                listener.on_job_done(job, now)

    def forget_job(self, job: Job, now: float) -> None:
        for tip in list(job.tips):
            self._drop(tip, BranchEnd.JOB_FORGOTTEN, now)
        self._job_gone(job, now)

    def _job_gone(self, job: Job, now: float) -> None:
        for listener in self._listeners:
            listener.on_job_gone(job, now)
