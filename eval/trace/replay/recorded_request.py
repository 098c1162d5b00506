"""A request of a trace: it counts its tokens, and knows the names of its blocks and the few tokens that a
policy read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast, overload

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.records.kv_transfer import KVLeaseOrder, KVTransfer, RemotePrefix
from engine.records.messages import JobRef, MediaSpan
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from eval.trace.replay.block_names import Segment
from eval.trace.replay.errors import NotReplayableError
from tracing.events import RequestArrived

GOING_ON = 0
STOPPING = 1
REFUSED = 2
"""Sampled tokens of a replay: one that continues, one that ends the request, one that its grammar refuses."""


class RecordedRequest(Request):
    """Counts tokens instead of holding them."""

    __slots__ = ("_block_size", "_coming", "num_tokens", "segment")

    num_tokens: int
    """A slot instead of a property: it is read in every step."""

    def __init__(
        self, arrived: RequestArrived, segment: Segment, chain: list[BlockHash], block_size: int
    ) -> None:
        wanted = StructuredOutputsParams(json_object=True) if arrived.awaits_grammar else None
        params = SamplingParams(
            max_tokens=arrived.max_tokens, stop_token_ids=[STOPPING], structured_outputs=wanted
        )
        super().__init__(
            arrived.req_id,
            [],
            params,
            arrived.arrival_s,
            priority=arrived.priority,
            adapter=arrived.adapter,
            media=[MediaSpan(*span) for span in arrived.media],
            job=_job_ref(arrived),
            external_id=arrived.external_id,
            kv_transfer=_kv_transfer(arrived),
        )
        self.num_prompt_tokens = self.num_tokens = arrived.num_prompt_tokens
        self.all_token_ids = cast(list[int], RecordedTokens(self, arrived.tokens))
        self.block_hashes = chain
        self.segment = segment
        self._coming: deque[BlockHash] = deque()
        self._block_size = block_size

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def expect(self, names: list[BlockHash]) -> None:
        """Adds the names of the blocks that its next tokens fill."""
        self._coming.extend(names)

    def append_output_token(self, token_id: int) -> None:
        self.num_tokens += 1
        if self._coming and not self.num_tokens % self._block_size:
            self.block_hashes.append(self._coming.popleft())


def _kv_transfer(arrived: RequestArrived) -> KVTransfer | None:
    """Returns a transfer with the request's id for a lease, as the trace lacks the lease's key."""
    if arrived.lease_s:
        return KVLeaseOrder(arrived.req_id, arrived.lease_s)
    if arrived.remote_tokens:
        return RemotePrefix("", arrived.remote_tokens, "", 0, must_load=arrived.must_load)
    return None


class RecordedTokens(Sequence[int]):
    """A request's tokens, of which only some runs are known."""

    def __init__(self, request: RecordedRequest, runs: list[tuple[int, list[int]]]) -> None:
        self._request = request
        self._runs = runs

    def __len__(self) -> int:
        return self._request.num_tokens

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        places = range(len(self))[place]
        return self.at(places) if isinstance(places, int) else _Cut(self, places)

    def __iter__(self) -> Iterator[int]:
        """Yields numbers instead of tokens: callers use only their count."""
        return iter(range(len(self)))

    def at(self, place: int) -> int:
        """Raises NotReplayableError if the policy did not read the token when the trace was written."""
        for first, tokens in self._runs:
            if first <= place < first + len(tokens):
                return tokens[place - first]
        raise NotReplayableError(
            f"the policy looks at token {place} of {self._request.request_id}, which is not in the trace"
        )


class _Cut(Sequence[int]):
    """Consecutive tokens, looked up only when they are read."""

    def __init__(self, tokens: RecordedTokens, places: range) -> None:
        self._tokens = tokens
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        places = self._places[place]
        return self._tokens.at(places) if isinstance(places, int) else _Cut(self._tokens, places)


class RecordedGrammar:
    """Ends the request where it ended in the trace."""

    def __init__(self) -> None:
        self._last = GOING_ON

    def accept(self, token_id: int) -> bool:
        self._last = token_id
        return token_id != REFUSED

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Allows all: drafts are cut before they become an input."""
        return len(token_ids)

    def forced(self, most: int) -> Sequence[int]:
        """Returns none: drafts come from the recording."""
        return ()

    @property
    def complete(self) -> bool:
        return self._last == STOPPING


def _job_ref(arrived: RequestArrived) -> JobRef | None:
    if not arrived.in_job:
        return None
    return JobRef(
        arrived.job_id,
        arrived.is_last_step,
        arrived.tenant,
        arrived.num_replies,
        arrived.num_results,
        owner=arrived.owner,
        asked_ttl_s=arrived.asked_ttl_s,
        is_silent=arrived.is_silent,
        deadline_s=arrived.deadline_s,
        moved=arrived.moved,
        parent_id=arrived.parent_id,
        prewarms=arrived.prewarms,
    )
