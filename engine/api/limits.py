"""How much the server takes on at once: places for requests, and for prompt tokens still to be computed.

A request gets its place before any work is done for it. It must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.api.config import LimitsConfig
from engine.api.errors import OverloadedError
from engine.api.processes.load_board import LoadBoard, Tally


class Admission:
    """The places of all front-end processes together, as their board counts them."""

    def __init__(self, limits: LimitsConfig, board: LoadBoard, on_rejection: Callable[[str], None]) -> None:
        """``on_rejection`` is told the name of the limit."""
        self._max_reqs = limits.max_num_queued_reqs
        self._max_tokens = limits.max_num_queued_tokens
        self._board = board
        self._on_rejection = on_rejection

    @contextmanager
    def seat(self, num_requests: int) -> Iterator[Seat]:
        """Places for a request that makes so many; OverloadedError if those are too many beside others."""
        num_requests = max(1, num_requests)  # not checked yet
        self._take_requests(num_requests)
        try:
            yield Seat(self)
        finally:
            self._board.add(Tally.QUEUED_REQS, -num_requests)

    def _take_requests(self, number: int) -> None:
        # Taken first and given back if it was too much: of two processes that ask at the same moment both may
        # be refused the last place, but never do both get it. Alone, any number is taken: a request of more
        # than the limit would never be served otherwise.
        self._board.add(Tally.QUEUED_REQS, number)
        total = self._board.total(Tally.QUEUED_REQS)
        limit = self._max_reqs
        if limit is not None and total > limit and total > number:
            self._board.add(Tally.QUEUED_REQS, -number)
            self._reject("max_num_queued_reqs", f"{limit} requests")

    def take_tokens(self, number: int) -> None:
        """OverloadedError if these are too many beside the others; alone, any number is taken."""
        self._board.add(Tally.QUEUED_TOKENS, number)
        total = self._board.total(Tally.QUEUED_TOKENS)
        limit = self._max_tokens
        if limit is not None and total > limit and total > number:
            self._board.add(Tally.QUEUED_TOKENS, -number)
            self._reject("max_num_queued_tokens", f"{limit} prompt tokens")

    def give_back_tokens(self, number: int) -> None:
        self._board.add(Tally.QUEUED_TOKENS, -number)

    def _reject(self, limit: str, told: str) -> None:
        self._on_rejection(limit)
        raise OverloadedError(f"The server has as much in hand as it takes ({told}); try again shortly.")


class Seat:
    """A request that has its place; its prompts may now ask for theirs."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def prefill(self, num_tokens: int) -> Prefill:
        """A prompt of so many tokens is about to be computed; OverloadedError if that is too much."""
        self._admission.take_tokens(num_tokens)
        return Prefill(self._admission, num_tokens)


class Prefill:
    """A prompt that counts as waiting until its first token is there, or it is given up."""

    def __init__(self, admission: Admission, num_tokens: int) -> None:
        self._admission = admission
        self._num_tokens = num_tokens

    def done(self) -> None:
        """May be called again."""
        if self._num_tokens:
            self._admission.give_back_tokens(self._num_tokens)
            self._num_tokens = 0
