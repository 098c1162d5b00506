"""paper: Continuum as published (arXiv 2511.02230 v6), with an offline prefill profile.

Where the paper is silent: T̄ is the mean wait of the last 100 turns that returned to no pin; a program counts
for η when its client ends it or a turn calls no tool; growing running turns revoke pins before they preempt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.program_stats import Memoryfulness, QueueDelay
from continuum.learning.tool_gaps import ObservedGaps, tool_name
from continuum.queueing.order import waiting_key
from continuum.retention.ttl import PaperRule, TtlInputs
from engine.core.policy import Pin, PolicyContext, WaitingKey
from engine.core.request import Request
from engine.records.messages import ToolCall
from estimator.tool_key import ToolKey
from eval.baselines.holding import GRACE_S, RetainingPolicy
from eval.baselines.knowledge import Knowledge

NO_TOOL = ToolKey(("no tool",))


class PaperPolicy(RetainingPolicy):
    """τ = argmax P(τ, f)·(T̄·η + PrefillReload) − τ over the gaps seen after tool f.

    A request whose allocation fails revokes pins, the latest program's first, until it fits.
    """

    name = "paper"

    def __init__(self, context: PolicyContext, knowledge: Knowledge) -> None:
        super().__init__(context)
        self._knowledge = knowledge
        self._rule = PaperRule()
        self._gaps: defaultdict[ToolKey, ObservedGaps] = defaultdict(ObservedGaps)
        self._all_gaps = ObservedGaps()
        self._queue_delay = QueueDelay()
        self._memoryfulness = Memoryfulness()

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        if tip.tools is None:
            return GRACE_S
        inputs = TtlInputs(
            curve=self._gaps[tip.tools[0]].curve(),
            global_curve=self._all_gaps.curve(),
            num_blocks=self._context.blocks_of_pin(len(tip.chain)),
            prefill_s=self._prefill_or_reload_s(len(tip.chain) * self._block_size),
            queue_delay_s=self._queue_delay.mean_s,
            memoryfulness=self._memoryfulness.value,
            called_tools=tip.tools[0] is not NO_TOOL,
        )
        return self._rule.choose_ttl(inputs).ttl_s

    def _prefill_or_reload_s(self, num_tokens: int) -> float:
        reload_s = self._knowledge.reload_s(num_tokens)
        return self._knowledge.prefill_s(num_tokens) if reload_s is None else reload_s

    def tools_known(self, tip: BranchTip, calls: Sequence[ToolCall], now: float) -> None:
        name = tool_name(calls)
        tip.tools = [NO_TOOL if name is None else ToolKey((name,))]
        super().tools_known(tip, calls, now)

    def gap_over(self, turn: Turn, tip: BranchTip, gap_s: float, now: float) -> None:
        super().gap_over(turn, tip, gap_s, now)
        self._all_gaps.observe(gap_s)
        if tip.tools:
            self._gaps[tip.tools[0]].observe(gap_s)

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        turn = self._turns.get(request.request_id)
        evicted = turn is not None and turn.tip is not None and not turn.warm
        if evicted and request.num_preemptions == 0:
            self._queue_delay.observe(now - request.arrival_time)
        return super().on_admitted(request, now)

    def program_over(self, job: Job, now: float) -> None:
        self._memoryfulness.observe_job(job.num_turns)

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return waiting_key(request, self._turns.get(request.request_id))

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        return self.pins_to_break(requester)
