"""Decides which pictures and clips the encoder computes in a step, and which outputs are kept: V1's encoder
cache. Both are called pictures here.

The tokens of a picture are computed from the encoder's whole output for it. An output is kept until no
request needs it, and then while there is space: another request with the same picture, or this one after a
preemption, reuses it. Sizes are in embeddings, one for each token of a picture.

Pure: each plan lists what the worker, which holds the outputs, computes and drops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.outputs import SchedulerOutput
from engine.core.parts import Batch, ChunkLimit, Left, SchedulerPart
from engine.core.request import Request, RequestStatus
from engine.core.step import Step
from engine.records.messages import MediaSpan

Use = tuple[str, int]
"""A picture of a request: the request's id, and the picture's index in it."""


@dataclass(slots=True)
class _Output:
    """An output that the worker holds, now or once the plan is carried out."""

    num_embeds: int
    uses: list[Use] = field(default_factory=list)
    """Pictures whose tokens are still to be computed from it."""


class MediaLimit(ChunkLimit):
    """Limits the pictures of a step. Once a request waits for a picture, other waiting requests with pictures
    wait, too; those without pictures pass, as they take nothing that it waits for."""

    def __init__(self, encoder: EncoderCacheManager) -> None:
        self._encoder = encoder
        self._one_waits = False

    def cut(self, request: Request, start: int, num_tokens: int, hit: Sequence[KVCacheBlock] | None) -> int:
        if not request.media:
            return num_tokens
        num_left = self._encoder.cut(request, start, num_tokens)
        if not num_left and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._one_waits = True
        return num_left

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        if request.media:
            self._encoder.commit(request, start, num_tokens)

    def sets_aside(self, request: Request) -> bool:
        return self._one_waits and bool(request.media)


class EncoderCacheManager(SchedulerPart):
    """Tracks the outputs of one worker's encoder, by the content hash of their pictures."""

    def __init__(self, cache_size: int, step_size: int, *, keeps_whole: bool = False) -> None:
        """``cache_size``: capacity for outputs. ``step_size``: the most that a step computes. Both are in
        embeddings, and at least one picture's. ``keeps_whole``: cut a step before a picture of which it
        would compute only some tokens, unless the step begins there."""
        self.cache_size = cache_size
        self.step_size = step_size
        self.keeps_whole = keeps_whole
        self._outputs: dict[str, _Output] = {}
        self._idle: dict[str, None] = {}
        """Outputs without uses, the longest idle first."""
        self._num_free = cache_size
        self._num_idle = 0
        self._uses: dict[str, dict[int, str]] = {}
        """Hashes of the pictures whose outputs each request uses, by request id and picture index."""
        self._budget = step_size
        self._planned: dict[str, Use] = {}
        """Outputs that the plan being made computes, and for which picture."""
        self._evicted: list[str] = []

    @property
    def num_used(self) -> int:
        """Embeddings of outputs that requests need."""
        return self.cache_size - self._num_free - self._num_idle

    @property
    def num_cached(self) -> int:
        """Number of outputs."""
        return len(self._outputs)

    # ---- a plan, from its first request to its last ----

    def limit(self, step: Step, batch: Batch, inner: tuple[ChunkLimit, ...]) -> ChunkLimit:
        return MediaLimit(self)

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of ``num_tokens`` tokens from ``start`` on a step may compute: those before a picture that
        exceeds the budget or the free space, or would be split where pictures go whole. Changes nothing."""
        room = self._num_free + self._num_idle
        budget = self._budget
        seen = set[str]()
        for span in request.media:
            if span.end <= start:
                continue
            if span.offset >= start + num_tokens:
                break
            if self.keeps_whole and start < span.offset and start + num_tokens < span.end:
                return span.offset - start
            if span.content_hash in seen:
                continue
            seen.add(span.content_hash)
            output = self._outputs.get(span.content_hash)
            if output is not None and output.uses:
                continue
            cost = span.length if output is None else 0
            if span.length > room or cost > budget:
                return max(0, span.offset - start)
            room -= span.length
            budget -= cost
        return num_tokens

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """Plan the outputs that these tokens of a request need; ``cut`` has allowed all of them."""
        needed = [
            (index, span)
            for index, span in enumerate(request.media)
            if span.end > start and span.offset < start + num_tokens
        ]
        for index, span in needed:  # first those that exist, so that they are not evicted for the others
            if span.content_hash in self._outputs:
                self._use(request, index, span)
        for index, span in needed:
            if span.content_hash not in self._outputs:
                self._plan(request, index, span)
            self._use(request, index, span)

    def fill(self, plan: SchedulerOutput, requests: Mapping[str, Request], now: float) -> None:
        """Add to the plan what the worker computes and drops, and release the outputs that its tokens needed
        last."""
        inputs: dict[str, list[int]] = {}
        for request_id, index in self._planned.values():
            inputs.setdefault(request_id, []).append(index)
        plan.scheduled_encoder_inputs = inputs
        plan.free_encoder_mm_hashes = self._evicted
        self._planned = {}
        self._evicted = []
        self._budget = self.step_size
        for request_id in self._uses.keys() & plan.num_scheduled_tokens.keys():
            request = requests[request_id]
            for index in list(self._uses[request_id]):
                if request.media[index].end <= request.num_computed_tokens:
                    self._end_use(request_id, index)

    # ---- requests that leave, and resets ----

    def left(self, request: Request, how: Left, now: float) -> None:
        """Release all that a request uses: it has ended, or was preempted, maybe in the plan being made."""
        for index in list(self._uses.get(request.request_id, ())):
            self._end_use(request.request_id, index)
        if how is Left.SPOILED:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Drop the outputs for a request's pictures, which may be wrong. Other users need them again."""
        for content_hash in {span.content_hash for span in request.media} & self._outputs.keys():
            for request_id, index in list(self._outputs[content_hash].uses):
                self._end_use(request_id, index)
            self._evict(content_hash)

    def drop_cached(self) -> None:
        """Drop all outputs that no request uses."""
        for content_hash in list(self._idle):
            self._evict(content_hash)

    def check_invariants(self) -> None:
        """Raise AssertionError unless sizes and uses agree with each other."""
        held = {key: output for key, output in self._outputs.items() if output.uses}
        assert self._outputs.keys() - held.keys() == self._idle.keys()
        assert self._num_idle == sum(self._outputs[key].num_embeds for key in self._idle)
        assert self._num_free == self.cache_size - sum(o.num_embeds for o in self._outputs.values()) >= 0
        uses = {(request_id, i): key for request_id, its in self._uses.items() for i, key in its.items()}
        assert uses == {use: key for key, output in held.items() for use in output.uses}
        assert 0 <= self._budget <= self.step_size

    def _plan(self, request: Request, index: int, span: MediaSpan) -> None:
        while span.length > self._num_free:
            self._evict(next(iter(self._idle)))
        self._num_free -= span.length
        self._budget -= span.length
        self._outputs[span.content_hash] = _Output(span.length)
        self._idle[span.content_hash] = None
        self._num_idle += span.length
        self._planned[span.content_hash] = request.request_id, index

    def _use(self, request: Request, index: int, span: MediaSpan) -> None:
        its = self._uses.setdefault(request.request_id, {})
        if index in its:
            return
        its[index] = span.content_hash
        output = self._outputs[span.content_hash]
        if not output.uses:
            del self._idle[span.content_hash]
            self._num_idle -= output.num_embeds
        output.uses.append((request.request_id, index))

    def _end_use(self, request_id: str, index: int) -> None:
        its = self._uses[request_id]
        content_hash = its.pop(index)
        if not its:
            del self._uses[request_id]
        output = self._outputs[content_hash]
        output.uses.remove((request_id, index))
        if output.uses:
            if self._planned.get(content_hash) == (request_id, index):
                self._planned[content_hash] = output.uses[0]
            return
        self._idle[content_hash] = None
        self._num_idle += output.num_embeds
        if self._planned.pop(content_hash, None) is not None:  # and now no request computes it
            self._budget += output.num_embeds
            self._drop(content_hash)

    def _evict(self, content_hash: str) -> None:
        self._drop(content_hash)
        self._evicted.append(content_hash)

    def _drop(self, content_hash: str) -> None:
        """Forget an idle output."""
        num_embeds = self._outputs.pop(content_hash).num_embeds
        del self._idle[content_hash]
        self._num_idle -= num_embeds
        self._num_free += num_embeds
