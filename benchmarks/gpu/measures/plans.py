"""Makes step plans like a scheduler's, for steps that are timed without one.

A sequence that begins in the middle reads whatever the pool holds: valid for timing only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core.outputs import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.records.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True)


@dataclass(slots=True)
class Planner:
    """Allocates the blocks of a pool; all sequences must end before it starts over."""

    num_blocks: int
    """Blocks of the pool, including the null block."""
    block_size: int
    vocab_size: int
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _num_taken: int = 0

    def begin(self, lengths: Sequence[tuple[int, int]], room: int = 0) -> SchedulerOutput:
        """Plans sequences of (new, cached) tokens, all new ones in this step, with blocks for ``room``
        more."""
        requests = [self._request(new, cached, room) for new, cached in lengths]
        scheduled = {request.req_id: new for request, (new, _) in zip(requests, lengths, strict=True)}
        return _plan(scheduled, new=requests)

    def again(self, begun: SchedulerOutput) -> SchedulerOutput:
        """Plans the same prompts in the same blocks as new sequences; those of ``begun`` must have ended."""
        requests = [
            replace(request, req_id=f"timed-{next(self._ids)}") for request in begun.scheduled_new_reqs
        ]
        counts = begun.num_scheduled_tokens.values()
        return _plan(
            {request.req_id: count for request, count in zip(requests, counts, strict=True)}, new=requests
        )

    def rewind(self) -> None:
        """Starts again at the pool's first block."""
        self._num_taken = 0

    def longest(self, num_seqs: int) -> int:
        """Returns the tokens of each of ``num_seqs`` sequences that fit in the pool at once."""
        return (self.num_blocks - 1) // num_seqs * self.block_size

    def _request(self, new: int, cached: int, room: int) -> NewRequestData:
        number = next(self._ids)
        tokens = [(number + 7 * place) % self.vocab_size for place in range(new + cached)]
        blocks = [self._take_block() for _ in range(self._blocks_for(new + cached + room))]
        return NewRequestData(f"timed-{number}", tokens, GREEDY, blocks, cached)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take_block(self) -> int:
        self._num_taken += 1
        assert self._num_taken < self.num_blocks, "the pool is too small"
        return self._num_taken


@dataclass(slots=True)
class Decoding:
    """Sequences that get one token in each following step, or as many as are verified."""

    num_computed: dict[str, int]

    @classmethod
    def of(cls, begun: SchedulerOutput) -> Decoding:
        return cls(
            {
                new.req_id: new.num_computed_tokens + begun.num_scheduled_tokens[new.req_id]
                for new in begun.scheduled_new_reqs
            }
        )

    def step(self) -> SchedulerOutput:
        plan = self.verification({})
        for req_id in self.num_computed:
            self.num_computed[req_id] += 1
        return plan

    def verification(self, drafts: Mapping[str, list[int]]) -> SchedulerOutput:
        """Plans a step with drafts; call ``verified`` with its output."""
        ids = list(self.num_computed)
        cached = CachedRequestData(
            req_ids=ids,
            new_block_ids=[[] for _ in ids],
            num_computed_tokens=list(self.num_computed.values()),
        )
        scheduled = {req_id: 1 + len(drafts.get(req_id, ())) for req_id in ids}
        return replace(_plan(scheduled, cached=cached), scheduled_spec_decode_tokens=drafts)

    def verified(self, output: ModelRunnerOutput) -> None:
        """Takes the output of a step with drafts."""
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.num_computed[req_id] += len(tokens)

    def end(self) -> SchedulerOutput:
        return ending(self.num_computed)


def ending(req_ids: Iterable[str]) -> SchedulerOutput:
    """Plans a step without tokens that ends these requests."""
    return _plan({}, finished=set(req_ids))


def no_tokens() -> SchedulerOutput:
    return _plan({})


def _plan(
    scheduled: dict[str, int],
    new: Sequence[NewRequestData] = (),
    cached: CachedRequestData | None = None,
    finished: set[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached or CachedRequestData(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=finished or set(),
        preempted_req_ids=set(),
    )
