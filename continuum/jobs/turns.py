"""Open turns: the job of each, which tip it continues, and whether it repeats a turn that its client gave
up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from continuum.jobs.continuation import Continuation, continuation_of, continuation_of_one
from continuum.jobs.cut_turns import CutTurn, CutTurns
from continuum.jobs.job import Job, Turn
from continuum.jobs.registry import JobRegistry
from engine.core.request import Request
from engine.records.block_chain import BlockChain


class Turns:
    """Turns from their arrival to their end, in order of arrival."""

    def __init__(
        self,
        jobs: JobRegistry,
        block_size: int,
        *,
        infer_jobs: bool,
        on_new_turn: Callable[[Job, Request], None],
    ) -> None:
        """With ``infer_jobs``, requests without a job id are turns, too. ``on_new_turn`` is called for each
        turn except repeated ones."""
        self._jobs = jobs
        self._block_size = block_size
        self._infer_jobs = infer_jobs
        self._on_new_turn = on_new_turn
        self._cut = CutTurns(block_size)
        self._open: dict[str, Turn] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._open.values())

    def get(self, request: Request) -> Turn | None:
        """The turn of a request; None if the request belongs to no job."""
        return self._open.get(request.request_id)

    def longest_wait_s(self, now: float) -> float:
        """For how long the turn has waited that waits for the longest; 0 if none waits."""
        waiting = (turn for turn in self._open.values() if turn.admitted_s is None)
        return max((now - turn.request.arrival_time for turn in waiting), default=0.0)

    def open(self, request: Request, now: float) -> Turn | None:
        """Opens the turn of a request that arrived; returns None if it belongs to no job."""
        if request.job is None or (request.job.job_id is None and not self._infer_jobs):
            return None
        job, recognized = self._jobs.open(request)
        if recognized is not None:
            continuation = continuation_of_one(recognized, request, self._block_size)
        else:
            continuation = continuation_of(job.tips, request, self._block_size)
        return self._begin(job, request, continuation, self._cut.take(request, now))

    def _begin(self, job: Job, request: Request, continuation: Continuation, cut: CutTurn | None) -> Turn:
        """Begins a turn. ``cut`` is the turn that it repeats: if that belonged to the same job, the new turn
        keeps its number and does not count as one more."""
        job.is_finished = False  # even if the client announced the end
        job.priority = request.priority
        tip = continuation.tip
        if cut is not None and cut.job is job:
            number = cut.number
        else:
            number = job.num_turns = job.num_turns + 1
            if job.num_turns > 1:
                self._jobs.establish(job)
            self._on_new_turn(job, request)
        turn = Turn(
            job,
            request,
            number,
            tip,
            continuation.num_shared_blocks * self._block_size,
            0 if tip is None or tip.ahead is None else self._num_shared_tokens(tip.ahead, request),
            diverged_at_token=continuation.diverged_at_token,
            num_diverged_tokens=continuation.num_diverged_tokens,
            num_task_tokens=request.num_prompt_tokens if tip is None else tip.num_task_tokens,
        )
        if cut is not None:
            _keep_place(turn, cut)
        job.turns[request.request_id] = self._open[request.request_id] = turn
        self._jobs.begin_turn(turn, request.num_prompt_tokens // self._block_size)
        return turn

    def _num_shared_tokens(self, chain: BlockChain, request: Request) -> int:
        return chain.num_shared(request.block_hashes) * self._block_size

    def close(self, request: Request, now: float) -> Turn | None:
        """Closes and returns the turn of a request that has ended for any reason."""
        turn = self._open.pop(request.request_id, None)
        if turn is not None:
            del turn.job.turns[request.request_id]
            turn.closed()
            self._jobs.end_turn(turn)
            self._jobs.touch(turn.job, now)
        return turn

    def cut_off(self, turn: Turn, now: float) -> Turn | None:
        """Records that the client gave up a turn, which has ended. The client may already have sent the
        request again: then the waiting turn that repeats it takes its place and is returned."""
        self._cut.remember(turn, now)
        if turn.num_cached_tokens is not None:
            return None
        for again in turn.job.turns.values():
            waits = again.num_cached_tokens is None and again.repeats is None
            is_later = waits and again.number > turn.number
            if is_later and self._cut.asks_the_same(again.request, turn.request):
                cut = self._cut.take(again.request, now)
                if cut is None:
                    return None
                _keep_place(again, cut)
                return again
        return None


def _keep_place(turn: Turn, cut: CutTurn) -> None:
    """Gives the turn the waiting time of the turn that it repeats."""
    turn.repeats = cut.request_id
    turn.kept_since_s = cut.waits_since_s
    turn.keeps_warm = cut.was_warm
    turn.job.first_arrival_s = min(turn.job.first_arrival_s, turn.waits_since_s)
