"""For how long the KV of a turn that ended is held: asks the rule; keeps pin, receipt and trace in step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from continuum.branches import BranchEnd, BranchListener
from continuum.config import ContinuumConfig
from continuum.forecast import WorkForecast
from continuum.jobs import Frontier, Turn
from continuum.kv_cost import KvCost
from continuum.pins import PinTable
from continuum.policy_trace import PolicyTrace
from continuum.program_stats import QueueDelay
from continuum.tool_gaps import PublishedGaps
from continuum.tool_memory import ToolMemory
from continuum.ttl import TtlDecision, TtlInputs
from engine.core.block_hash import BlockHash
from engine.policy import Pin, PolicyContext
from estimator.survival import SurvivalCurve

UNTIL_READ = TtlDecision(0.0, "a single question, unless it called a tool")
NO_ROOM = TtlDecision(0.0, "pin budget is used up")
LEFT_BEHIND = TtlDecision(0.0, "the job went on without it")

ChooseTtl = Callable[[Frontier, TtlInputs], TtlDecision]


class Holding(BranchListener):
    """Decides when a turn ends, and anew when more is known of what it waits for."""

    def __init__(
        self,
        context: PolicyContext,
        config: ContinuumConfig,
        pins: PinTable,
        choose_ttl: ChooseTtl,
        *,
        tools: ToolMemory,
        kv_cost: KvCost,
        queue_delay: QueueDelay,
        forecast: WorkForecast,
        published: PublishedGaps | None,
        trace: PolicyTrace,
    ) -> None:
        """``choose_ttl`` answers; what it is told is read from those who learn. ``published``: for a rule
        that goes by gaps as they were published, and that what clients say does not move."""
        self._block_size = context.block_size
        self._num_blocks = context.num_blocks
        self._config = config
        self._pins = pins
        self._choose_ttl = choose_ttl
        self._tools = tools
        self._kv_cost = kv_cost
        self._queue_delay = queue_delay
        self._forecast = forecast
        self._published = published
        self._trace = trace
        self._pin_ids = itertools.count(1)

    def begin(self, frontier: Frontier, block_hashes: list[BlockHash], now: float) -> Pin | None:
        """Pin at once, for a short grace at least: what the turn called is about to be known."""
        known = frontier.job.is_established
        decision = self._decide(frontier, now) if known else UNTIL_READ
        if not known:
            self.tell(frontier, decision)
        if not block_hashes:
            return None
        if decision.is_final:
            self._trace.refused(frontier, now)
            return None
        if not self._pins.make_room(frontier.job, len(block_hashes), displace=known):
            self.tell(frontier, NO_ROOM)
            self._trace.refused(frontier, now)
            return None
        pin = Pin(
            next(self._pin_ids),
            frontier.job.job_id,
            frontier.request_id,
            block_hashes,
            deadline_s=now + max(decision.ttl_s, self._config.grace_s),
        )
        self._pins.add(pin, frontier)
        self.tell(frontier, decision)
        self._trace.created(pin, frontier, now)
        return pin

    def decide_anew(self, frontier: Frontier, now: float, remaining: SurvivalCurve | None = None) -> None:
        """More is known of what it waits for. ``remaining``: time until the return as it looks now, which
        then is where the rule counts from; None: as it looked when the turn ended."""
        if self._published is not None:
            remaining = None
        decision = self._decide(frontier, now, remaining)
        if frontier.pin is not None:
            self._pins.set_deadline(frontier.pin, frontier.ended_s + decision.ttl_s)

    def let_go(self, frontier: Frontier, why: TtlDecision) -> None:
        """Nobody will come back to it, or not soon enough."""
        self._unpin(frontier)
        self.tell(frontier, why)

    def give_back(self, turn: Turn) -> None:
        """The turn has ended: a pin that it had come back to and never took over goes."""
        if turn.frontier is not None:
            self._unpin(turn.frontier)

    def on_continued(self, frontier: Frontier, turn: Turn, now: float) -> None:
        if frontier.pin is not None:
            self._pins.claim(frontier.pin)

    def on_superseded(self, frontier: Frontier, turn: Turn, num_shared_blocks: int, now: float) -> None:
        self.tell(frontier, LEFT_BEHIND)

    def on_dropped(self, frontier: Frontier, end: BranchEnd, now: float) -> None:
        self._unpin(frontier)

    def _unpin(self, frontier: Frontier) -> None:
        if frontier.pin is not None:
            self._pins.let_go(frontier.pin)

    def tell(self, frontier: Frontier, decision: TtlDecision) -> None:
        """Put the decision into the receipt, as far as it came true."""
        receipt, pin = frontier.receipt, frontier.pin
        if receipt is None or (pin is None and receipt.reason == NO_ROOM.reason):
            return  # whatever is decided now, it was let go at the turn's end
        held = pin is not None and decision.ttl_s > 0
        frontier.receipt = structs.replace(
            receipt,
            pinned_tokens=pin.num_blocks * self._block_size if held and pin is not None else 0,
            ttl_s=decision.ttl_s if held else 0.0,
            reason=decision.reason,
        )

    def _decide(self, frontier: Frontier, now: float, remaining: SurvivalCurve | None = None) -> TtlDecision:
        """Ask the rule, with all it may look at; the answer goes into the receipt and the trace."""
        job, curve = frontier.job, remaining
        if curve is None:
            curve = self._tools.curve(frontier.tools, job.job_id, job.tenant)
        elapsed_s = 0.0 if remaining is None else now - frontier.ended_s
        inputs = self._inputs(frontier, curve)
        decision = self._choose_ttl(frontier, inputs)
        ttl_s = elapsed_s + decision.ttl_s if decision.ttl_s > 0 else 0.0
        decision = replace(decision, ttl_s=min(ttl_s, self._config.max_ttl_s))
        self._trace.decided(frontier, inputs, decision, self._config.ttl_rule, now)
        if frontier.receipt is not None and curve.known_median_s is not None:
            expected_s = elapsed_s + curve.known_median_s
            frontier.receipt = structs.replace(frontier.receipt, expected_tool_s=expected_s)
        self.tell(frontier, decision)
        return decision

    def _of_any_tool(self, frontier: Frontier) -> SurvivalCurve:
        if self._published is not None:
            return self._published.curve_of_all(frontier)
        return self._tools.curve(None, tenant=frontier.job.tenant)

    def _inputs(self, frontier: Frontier, curve: SurvivalCurve) -> TtlInputs:
        num_tokens = len(frontier.chain) * self._block_size
        published = self._published
        return TtlInputs(
            curve=curve if published is None else published.curve(frontier),
            global_curve=self._of_any_tool(frontier),
            num_blocks=len(frontier.chain),
            pool_share=len(frontier.chain) / self._num_blocks,
            prefill_s=self._kv_cost.prefill_s(num_tokens),
            reload_s=self._kv_cost.reload_s(num_tokens),
            queue_delay_s=self._queue_delay.mean_s,
            memoryfulness=self._forecast.lengths.value,
            called_tools=frontier.tools is None or bool(frontier.tools),
            last_probability=self._tools.last_turn_probability(frontier.tools, frontier.job.tenant),
            has_plain_tool=frontier.tools is None or frontier.plain_tool is not None,
            plain_mean_s=None if published is None else published.mean_s(frontier),
        )
