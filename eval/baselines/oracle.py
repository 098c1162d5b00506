"""oracle: ``continuum``'s order, admission and revocation; knows the future when it decides pins."""

from __future__ import annotations

import math
from dataclasses import replace

from continuum.config import ContinuumConfig
from continuum.jobs.job import BranchTip
from continuum.policy import ContinuumPolicy
from continuum.retention.ttl import TtlDecision, TtlInputs
from engine.core.policy import Pin, PolicyContext
from engine.core.request import Request
from eval.baselines.knowledge import Knowledge

SLACK_S = 1.0
"""A pin lasts this long after the expected return; only a turn with sub-agents returns later."""
PRICE = 2.0
"""Device seconds that a second of the whole pool may cost while a request waits for blocks. 1 would count
only the recomputation; a recomputed turn also waits and occupies blocks. Mean completion times are alike from
1.5 to 3 (5 % worse at 1 and at 5), and with a host tier from 1 to 4 (3 % worse at 8, 13 % at 0)."""


class OraclePolicy(ContinuumPolicy):
    """Pins every turn that returns until it does, and unpins the least valuable when memory is short.

    Whenever a waiting turn does not fit, branch tips are unpinned until it does, those that return latest for
    their value first. Pinned for the remaining D, m of N blocks cost m·D/N seconds of the whole pool;
    unpinned they cost PrefillReload seconds of the device. A tip for which the first is less than ``PRICE``
    times the second stays pinned, whichever request waits. Returning turns have no bounded wait: with a host
    tier such a bound would raise the mean, which this policy is meant to minimize.
    """

    name = "oracle"

    def __init__(
        self, context: PolicyContext, knowledge: Knowledge, config: ContinuumConfig | None = None
    ) -> None:
        config = replace(config or ContinuumConfig(), max_ttl_s=math.inf, grace_s=0.0)
        super().__init__(context, replace(config, patience_s=math.inf))
        self._knowledge = knowledge
        self._context = context
        self._seconds_again: dict[int, float] = {}
        """PrefillReload by number of blocks of tokens."""

    def choose_ttl(self, tip: BranchTip, inputs: TtlInputs) -> TtlDecision:
        gap_s = self._knowledge.gap_s(tip.request_id)
        if gap_s is None:
            return TtlDecision(0.0, "the last turn")
        return TtlDecision(gap_s + SLACK_S, "until it returns")

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        self._release_for(request, num_free_blocks, now)
        return super().may_admit(request, num_free_blocks, now)

    def _release_for(self, request: Request, num_free_blocks: int, now: float) -> None:
        """Unpins until the request fits in the next step, except for tips that are worth their memory."""
        turn = self._turns.get(request)
        own = turn.pin if turn is not None else None
        missing = (
            self._context.blocks_for(-(-request.num_tokens // self._context.block_size)) - num_free_blocks
        )
        missing -= own.num_blocks if own is not None else 0
        if missing <= 0:
            return
        costs = (
            (self._cost(pin, now), pin.pin_id, pin) for pin in self._pins if not self._pins.is_claimed(pin)
        )
        for _, _, pin in sorted((cost for cost in costs if cost[0] > PRICE), reverse=True):
            self._pins.set_deadline(pin, now)
            missing -= pin.num_blocks
            if missing <= 0:
                return

    def _cost(self, pin: Pin, now: float) -> float:
        """Returns the pool seconds of a pin until the return, per device second that it saves."""
        remaining_s = pin.deadline_s - SLACK_S - now
        saved_s = self._prefill_or_reload_s(pin.num_prefix_blocks)
        return remaining_s * pin.num_blocks / self._context.num_countable_blocks / saved_s

    def _prefill_or_reload_s(self, num_blocks: int) -> float:
        seconds = self._seconds_again.get(num_blocks)
        if seconds is None:
            num_tokens = num_blocks * self._context.block_size
            reload_s = self._knowledge.reload_s(num_tokens)
            seconds = self._knowledge.prefill_s(num_tokens) if reload_s is None else reload_s
            self._seconds_again[num_blocks] = max(seconds, 1e-9)
        return self._seconds_again[num_blocks]
