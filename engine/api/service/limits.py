"""Admission control: limits on concurrent requests and on prompt tokens that wait for prefill.

A request is admitted before any other work is done for it. This module does not know HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

from engine.api.config import LimitsConfig
from engine.api.errors import OverloadedError, QuotaError, ServerClosingError
from engine.api.processes.shared_load import NAMED_SHARES, OTHER_SHARES, SharedLoad, Tally
from engine.api.tenants.quotas import Meter
from engine.frontend.request_output import RequestOutput
from engine.records.messages import JobRef, RequestContext


class Admission:
    """Admits requests of all API server processes together, shared fairly between tenants.

    When a limit is reached, a tenant that uses no more than an equal share is still admitted and others are
    refused, so one tenant's flood does not block the rest. The excess over the limit is less than the limit
    itself, whatever the number of tenants.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        board: SharedLoad,
        on_rejection: Callable[[str], None],
        owners: Sequence[str] = (),
        meter_of: Callable[[str | None], Meter | None] | None = None,
        model_names: Sequence[str] = (),
    ) -> None:
        """``on_rejection`` is called with the name of the limit. ``owners``: the owners of API
        keys, the same in each process. ``meter_of``: what counts an owner's requests against its quotas.
        ``model_names``: those of the model without an adapter."""
        self._meter_of = meter_of
        self._model_names = model_names
        self._max_reqs = limits.max_num_queued_reqs
        self._max_tokens = limits.max_num_queued_tokens
        self._board = board
        self._on_rejection = on_rejection
        self._shares = {owner: share for share, owner in enumerate(owners[:NAMED_SHARES])}
        self._num_admitted = 0
        """Number of bodies that this process has admitted and that have not ended."""
        self._all_ended = asyncio.Event()
        self.is_closed = False
        """Whether this process admits no more requests, because it is shutting down."""

    @contextmanager
    def admit(self, num_requests: int, context: RequestContext) -> Iterator[Permit]:
        """Admits a body that makes this many requests, before any work is done for it.
        OverloadedError beyond a limit, QuotaError beyond one of the key's, ServerClosingError while shutting
        down."""
        if self.is_closed:
            raise ServerClosingError
        num_requests = max(1, num_requests)  # may be invalid at this point
        share = self._share_of(context.job)
        self._acquire(Tally.QUEUED_REQS, share, num_requests)
        self._num_admitted += 1
        meter = None
        try:
            meter = self._meter(context, num_requests)
            yield Permit(self, share, meter)
        finally:
            if meter is not None:
                meter.end(num_requests)
            self._board.add(Tally.QUEUED_REQS, -num_requests, share)
            self._num_admitted -= 1
            if not self._num_admitted:
                self._all_ended.set()

    def _meter(self, context: RequestContext, num_requests: int) -> Meter | None:
        """What counts these requests for their key, which may have them; None for a key without quotas."""
        meter = None if self._meter_of is None else self._meter_of(context.owner)
        if meter is None:
            return None
        meter.check_model(self._model_names if context.adapter is None else (context.adapter.name,))
        try:
            meter.begin(num_requests)
        except QuotaError:
            self._on_rejection("quota")
            raise
        return meter

    def close(self) -> None:
        """Admits no more requests."""
        self.is_closed = True

    async def all_ended(self) -> None:
        """Returns when all admitted requests have ended."""
        while self._num_admitted:
            self._all_ended.clear()
            await self._all_ended.wait()

    def _share_of(self, job: JobRef | None) -> int:
        """The share of a tenant: an owner has a separate one. Other tenants are hashed to shares, since their
        number is unbounded."""
        if job is not None and job.owner in self._shares:
            return self._shares[job.owner]
        tenant = "" if job is None else job.tenant or ""
        return NAMED_SHARES + crc32(tenant.encode(errors="replace")) % OTHER_SHARES

    def note_too_late(self) -> None:
        """Counts a request that the engine refused because it would begin too late."""
        self._on_rejection("begins_too_late")

    def acquire_tokens(self, number: int, share: int) -> None:
        """Counts prompt tokens; OverloadedError if they exceed the limit together with those of others."""
        self._acquire(Tally.QUEUED_TOKENS, share, number)

    def release_tokens(self, number: int, share: int) -> None:
        self._board.add(Tally.QUEUED_TOKENS, -number, share)

    def _acquire(self, tally: Tally, share: int, number: int) -> None:
        # Acquired first and released if it was too much: two processes at the same moment may both be
        # refused, but never both admitted. A single request is always admitted: one larger than the limit
        # would never be served otherwise.
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
        amount = f"{limit} {'prompt tokens' if is_tokens else 'requests'}"
        raise OverloadedError(f"The server is at its limit of {amount}; try again shortly.")

    def _is_within_share(self, tally: Tally, share: int, number: int, limit: int) -> bool:
        """Whether the tenant uses no more than an equal share among active tenants. An owner without other
        work always does: a prompt larger than a share could otherwise never run during a flood."""
        held = self._board.held(tally, share)
        if held == number and share < NAMED_SHARES:
            return True
        num_sharing = self._board.num_sharing(tally)
        return num_sharing > 1 and held * num_sharing <= limit


class Permit:
    """An admitted request; its prompts are admitted separately."""

    def __init__(self, admission: Admission, share: int, meter: Meter | None) -> None:
        """``meter`` counts what the request's key uses; None if it has no quotas."""
        self._admission = admission
        self._share = share
        self._meter = meter
        self._since = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the body was admitted, before its prompt was made."""
        return time.monotonic() - self._since

    def note_too_late(self) -> None:
        """See ``Admission.note_too_late``."""
        self._admission.note_too_late()

    def prefill(self, num_tokens: int) -> PrefillPermit:
        """Admits a prompt of this many tokens; OverloadedError beyond the limit, QuotaError beyond the
        key's."""
        if self._meter is not None:
            self._meter.prompt(num_tokens)
        self._admission.acquire_tokens(num_tokens, self._share)
        return PrefillPermit(self._admission, num_tokens, self._share, self._meter)


class PrefillPermit:
    """An admitted prompt: it counts as waiting until its first token, or until it is given up."""

    def __init__(self, admission: Admission, num_tokens: int, share: int, meter: Meter | None) -> None:
        self._admission = admission
        self._num_tokens = num_tokens
        self._share = share
        self._meter = meter
        self._has_answered = False

    def came(self, output: RequestOutput) -> None:
        """Notes an output: the prompt waits no more, and its key has used what was computed."""
        self.done()
        if self._meter is not None and (
            output.pooled is not None or any(x.token_ids for x in output.outputs)
        ):
            self._meter.came(output, is_first=not self._has_answered)
            self._has_answered = True

    def done(self) -> None:
        """Stops counting the prompt as waiting. Repeatable."""
        if self._num_tokens:
            self._admission.release_tokens(self._num_tokens, self._share)
            self._num_tokens = 0
