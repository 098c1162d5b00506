"""Decides by the rule how long the KV of an ended turn is retained; keeps pin, receipt and trace
consistent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from continuum.config import ContinuumConfig
from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Turn
from continuum.learning.learners import Learners
from continuum.reports.policy_trace import PolicyTrace
from continuum.retention.pins import PinTable
from continuum.retention.ttl import TtlDecision, TtlInputs, at_least_as_asked
from continuum.retention.waiting_parents import LOOK_S, num_at_work
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import Pin, PolicyContext
from estimator.survival import SurvivalCurve

UNTIL_READ = TtlDecision(0.0, "a single question, unless it called a tool")
OVER_BUDGET = TtlDecision(0.0, "pin budget is used up")
SUB_AGENTS = "its sub-agents are at work"
SUPERSEDED = TtlDecision(0.0, "the job went on without it")

ChooseTtl = Callable[[BranchTip, TtlInputs], TtlDecision]


class Retention(BranchListener):
    """Decides when a turn ends, and again when more is known about its tools."""

    def __init__(
        self,
        context: PolicyContext,
        config: ContinuumConfig,
        pins: PinTable,
        choose_ttl: ChooseTtl,
        learners: Learners,
        trace: PolicyTrace,
    ) -> None:
        """``choose_ttl`` decides; ``learners`` supply its inputs."""
        self._context = context
        self._block_size = context.block_size
        self._config = config
        self._pins = pins
        self._choose_ttl = choose_ttl
        self._learners = learners
        self._tools = learners.tools
        self._published = learners.published
        self._trace = trace
        self._pin_ids = itertools.count(1)

    def begin(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> Pin | None:
        """Pins at once, at least for a short grace, since the turn's calls become known soon."""
        known = tip.job.is_established or tip.asked_ttl_s is not None
        decision, expected_s = self._decide(tip, now) if known else (UNTIL_READ, None)
        num_blocks = self._context.blocks_of_pin(len(block_hashes))
        pin = None
        if num_blocks and not decision.is_final:
            if self._pins.reserve(tip.job, num_blocks, displace=known):
                pin = self._pin(tip, block_hashes, num_blocks, decision, now)
            else:
                decision = OVER_BUDGET
        self._write_receipt(tip, decision, expected_s)
        if pin is not None:
            self._trace.created(pin, tip, now)
        elif num_blocks:  # a full chunk of chunked attention needs no block before it
            self._trace.refused(tip, num_blocks, now)
        return pin

    def _pin(
        self,
        tip: BranchTip,
        block_hashes: list[BlockHash],
        num_blocks: int,
        decision: TtlDecision,
        now: float,
    ) -> Pin:
        deadline_s = now + max(decision.ttl_s, self._config.grace_s)
        return self._add(tip, block_hashes, num_blocks, deadline_s)

    def _add(self, tip: BranchTip, block_hashes: list[BlockHash], num_blocks: int, deadline_s: float) -> Pin:
        pin = Pin(
            next(self._pin_ids),
            tip.job.job_id,
            tip.request_id,
            block_hashes,
            deadline_s=deadline_s,
            num_blocks=num_blocks,
        )
        self._pins.add(pin, tip)
        return pin

    def may_extend(self, tip: BranchTip, num_blocks: int) -> bool:
        """Whether the tip's pin may be replaced by one of so many blocks of tokens, and nobody's is lost."""
        pin = tip.pin
        if pin is None or num_blocks <= pin.num_prefix_blocks:
            return False
        num_more = self._context.blocks_of_pin(num_blocks) - pin.num_blocks
        return self._pins.reserve(tip.job, max(0, num_more), displace=False)

    def extend(self, tip: BranchTip, block_hashes: list[BlockHash], deadline_s: float, now: float) -> Pin:
        """Pins a tip whose pin has just ended, with what was computed behind it: until the same time."""
        num_blocks = self._context.blocks_of_pin(len(block_hashes))
        pin = self._add(tip, block_hashes, num_blocks, deadline_s)
        if tip.receipt is not None:
            tip.receipt = structs.replace(tip.receipt, pinned_tokens=len(block_hashes) * self._block_size)
        self._trace.extended(pin, tip, now)
        return pin

    def redecide(self, tip: BranchTip, now: float, remaining: SurvivalCurve | None = None) -> None:
        """Decides again, as more is known about the turn's tools.

        ``remaining`` is the expected time until the return from now on, and the rule counts from now. If
        None, the expectation at the turn's end is used.
        """
        if self._published is not None:
            remaining = None
        decision, expected_s = self._decide(tip, now, remaining)
        self._write_receipt(tip, decision, expected_s)
        if tip.pin is None:
            return
        if decision.ttl_s > 0:
            self._pins.set_deadline(tip.pin, tip.ended_s + decision.ttl_s)
        else:  # released, not expired: no wait was in vain
            self._pins.release(tip.pin)

    def holds_on(self, pin: Pin, longest_wait_s: Callable[[float], float], now: float) -> bool:
        """Whether a pin that is due is held on, because its job's sub-agents are at work: then it is due
        again a little later. Not while turns wait (``longest_wait_s``), probably for memory: then it would
        cost more than it spares (``docs/lab/policy.md``)."""
        tip = self._pins.tip_of(pin)
        num_children = num_at_work(tip, now)
        most_s = tip.ended_s + self._config.max_ttl_s
        if not num_children or now >= most_s or self._published is not None:
            return False
        if longest_wait_s(now) > LOOK_S:
            return False
        until_s = min(now + LOOK_S, most_s)
        decision = TtlDecision(until_s - tip.ended_s, SUB_AGENTS)
        if tip.receipt is None or tip.receipt.reason != SUB_AGENTS:
            self._trace.held_on(tip, decision, num_children, now)
        self._write_receipt(tip, decision)
        self._pins.set_deadline(pin, until_s)
        return True

    def release(self, tip: BranchTip, why: TtlDecision) -> None:
        """Unpins the tip: no turn will continue it, or not soon enough."""
        self._unpin(tip)
        self._write_receipt(tip, why)

    def give_back(self, turn: Turn) -> None:
        """Releases the pin that an ended turn waited for and never took over."""
        if turn.tip is not None:
            self._unpin(turn.tip)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        if tip.pin is not None:
            self._pins.claim(tip.pin)

    def on_superseded(self, tip: BranchTip, turn: Turn, num_shared_blocks: int, now: float) -> None:
        self._write_receipt(tip, SUPERSEDED)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        self._unpin(tip)

    def _unpin(self, tip: BranchTip) -> None:
        if tip.pin is not None:
            self._pins.release(tip.pin)

    def _write_receipt(
        self, tip: BranchTip, decision: TtlDecision, expected_tool_s: float | None = None
    ) -> None:
        """Writes the decision into the receipt, with the tokens that are actually pinned."""
        receipt = tip.receipt
        pin = tip.pin
        if receipt is None:
            return
        if expected_tool_s is not None:
            receipt = structs.replace(receipt, expected_tool_s=expected_tool_s)
        if pin is not None or receipt.reason != OVER_BUDGET.reason:  # without a pin no decision changes that
            held = pin is not None and decision.ttl_s > 0
            receipt = structs.replace(
                receipt,
                pinned_tokens=pin.num_prefix_blocks * self._block_size if held and pin is not None else 0,
                ttl_s=decision.ttl_s if held else 0.0,
                reason=decision.reason,
            )
        tip.receipt = receipt

    def _decide(
        self, tip: BranchTip, now: float, remaining: SurvivalCurve | None = None
    ) -> tuple[TtlDecision, float | None]:
        """Applies the rule to all its inputs and traces both. Returns the decision, and how long the tools
        are expected to take, in seconds; None if unknown."""
        job = tip.job
        curve = remaining
        if curve is None:
            curve = self._tools.curve(tip.tools, job.job_id, job.tenant)
        elapsed_s = 0.0 if remaining is None else now - tip.ended_s
        inputs = self._inputs(tip, curve)
        decision = self._choose_ttl(tip, inputs)
        ttl_s = elapsed_s + decision.ttl_s if decision.ttl_s > 0 else 0.0
        decision = replace(decision, ttl_s=min(ttl_s, self._config.max_ttl_s))
        if tip.asked_ttl_s is not None and self._published is None:
            decision = at_least_as_asked(
                decision,
                inputs,
                tip.asked_ttl_s,
                pool_price=self._config.pool_price,
                max_ttl_s=self._config.max_ttl_s,
            )
        self._trace.decided(tip, inputs, decision, self._config.ttl_rule, now)
        median_s = (self._tools.corrected_curve(tip) if remaining is None else curve).known_median_s
        expected_s = None if median_s is None else elapsed_s + median_s
        return decision, expected_s

    def _of_any_tool(self, tip: BranchTip) -> SurvivalCurve:
        if self._published is not None:
            return self._published.curve_of_all(tip)
        return self._tools.curve(None, tenant=tip.job.tenant)

    def _inputs(self, tip: BranchTip, curve: SurvivalCurve) -> TtlInputs:
        num_tokens = len(tip.chain) * self._block_size
        num_blocks = self._context.blocks_of_pin(len(tip.chain))
        published = self._published
        return TtlInputs(
            curve=curve if published is None else published.curve(tip),
            global_curve=self._of_any_tool(tip),
            num_blocks=num_blocks,
            pool_share=num_blocks / self._context.num_countable_blocks,
            prefill_s=self._learners.kv_cost.prefill_s(num_tokens),
            reload_s=self._learners.kv_cost.reload_s(num_tokens),
            queue_delay_s=self._learners.queue_delay.mean_s,
            memoryfulness=self._learners.work.forecast.lengths.value,
            called_tools=tip.tools is None or bool(tip.tools),
            last_probability=self._tools.last_turn_probability(tip.tools, tip.job.tenant),
            answer_return=self._learners.answers.share(tip.job.tenant),
            has_plain_tool=tip.tools is None or tip.plain_tool is not None,
            plain_mean_s=None if published is None else published.mean_s(tip),
        )
