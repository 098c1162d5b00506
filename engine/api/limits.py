"""How much the server takes on at once: places for requests, and for prompt tokens still to be computed.

A request gets its place before any work is done for it. It must not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

from engine.api.config import LimitsConfig
from engine.api.errors import OverloadedError, ServerClosingError
from engine.api.processes.load_board import NAMED_SHARES, OTHER_SHARES, LoadBoard, Tally
from engine.messages import JobRef, RequestContext


class Admission:
    """The places of all front-end processes together, as their board counts them, and as tenants share them.

    Where a limit is reached, who has no more than an equal part of it is taken on all the same, and all
    others are refused: so one tenant's flood is refused, and not who comes beside it. What comes on top is
    less than the limit once more, however many tenants there are.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        board: LoadBoard,
        on_rejection: Callable[[str], None],
        owners: Sequence[str] = (),
    ) -> None:
        """``on_rejection`` is told the name of the limit. ``owners``: whom keys name, the same in each
        process."""
        self._max_reqs = limits.max_num_queued_reqs
        self._max_tokens = limits.max_num_queued_tokens
        self._board = board
        self._on_rejection = on_rejection
        self._shares = {owner: share for share, owner in enumerate(owners[:NAMED_SHARES])}
        self._num_seated = 0
        """Bodies that this process has taken on."""
        self._unseated = asyncio.Event()
        self.is_closed = False
        """Whether this process takes no more requests, since it is about to stop."""

    @contextmanager
    def seat(self, num_requests: int, context: RequestContext) -> Iterator[Seat]:
        """Places for a body that makes so many requests, before any work is done for it. OverloadedError if
        those are too many beside others, ServerClosingError if no more are taken."""
        if self.is_closed:
            raise ServerClosingError
        num_requests = max(1, num_requests)  # not checked yet
        share = self._share_of(context.job)
        self._take(Tally.QUEUED_REQS, share, num_requests)
        self._num_seated += 1
        try:
            yield Seat(self, share)
        finally:
            self._board.add(Tally.QUEUED_REQS, -num_requests, share)
            self._num_seated -= 1
            if not self._num_seated:
                self._unseated.set()

    def close(self) -> None:
        """Take no more requests."""
        self.is_closed = True

    async def drain(self) -> None:
        """Take no more requests; returns when the last one has left its place."""
        self.close()
        while self._num_seated:
            self._unseated.clear()
            await self._unseated.wait()

    def _share_of(self, job: JobRef | None) -> int:
        """An owner's own; others may have one together, for there is no end of users that can be said."""
        if job is not None and job.owner in self._shares:
            return self._shares[job.owner]
        tenant = "" if job is None else job.tenant or ""
        return NAMED_SHARES + crc32(tenant.encode(errors="replace")) % OTHER_SHARES

    def take_tokens(self, number: int, share: int) -> None:
        """OverloadedError if these are too many beside the others; alone, any number is taken."""
        self._take(Tally.QUEUED_TOKENS, share, number)

    def give_back_tokens(self, number: int, share: int) -> None:
        self._board.add(Tally.QUEUED_TOKENS, -number, share)

    def _take(self, tally: Tally, share: int, number: int) -> None:
        # Taken first and given back if it was too much: of two processes that ask at the same moment both may
        # be refused the last place, but never do both get it. Alone, any number is taken: a request of more
        # than the limit would never be served otherwise.
        is_tokens = tally is Tally.QUEUED_TOKENS
        limit = self._max_tokens if is_tokens else self._max_reqs
        self._board.add(tally, number, share)
        if limit is None:
            return
        total = self._board.total(tally)
        if total <= limit or total == number or self._is_within_share(tally, share, number, limit):
            return
        self._board.add(tally, -number, share)
        self._on_rejection("max_num_queued_tokens" if is_tokens else "max_num_queued_reqs")
        told = f"{limit} {'prompt tokens' if is_tokens else 'requests'}"
        raise OverloadedError(f"The server has as much in hand as it takes ({told}); try again shortly.")

    def _is_within_share(self, tally: Tally, share: int, number: int, limit: int) -> bool:
        """Whether who asks has no more than an equal part among those who have anything, or nothing else,
        where a key names it: a prompt of more than such a part would never be served beside a flood."""
        held = self._board.held(tally, share)
        if held == number and share < NAMED_SHARES:
            return True
        num_sharing = self._board.num_sharing(tally)
        return num_sharing > 1 and held * num_sharing <= limit


class Seat:
    """A request that has its place; its prompts may now ask for theirs."""

    def __init__(self, admission: Admission, share: int) -> None:
        self._admission = admission
        self._share = share

    def prefill(self, num_tokens: int) -> Prefill:
        """A prompt of so many tokens is about to be computed; OverloadedError if that is too much."""
        self._admission.take_tokens(num_tokens, self._share)
        return Prefill(self._admission, num_tokens, self._share)


class Prefill:
    """A prompt that counts as waiting until its first token is there, or it is given up."""

    def __init__(self, admission: Admission, num_tokens: int, share: int) -> None:
        self._admission = admission
        self._num_tokens = num_tokens
        self._share = share

    def done(self) -> None:
        """May be called again."""
        if self._num_tokens:
            self._admission.give_back_tokens(self._num_tokens, self._share)
            self._num_tokens = 0
