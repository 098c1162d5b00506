"""paper: Continuum as published (arXiv 2511.02230 v6), with an offline prefill profile.

Where the paper is silent: T̄ is the mean wait of the last 100 turns that came back to no pin; a program counts
for η when its client ends it or a turn calls no tool; pins go before running turns when those grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from continuum.jobs import Frontier, Job, Turn
from continuum.order import waiting_key
from continuum.program_stats import Memoryfulness, QueueDelay
from continuum.tool_gaps import ObservedGaps, tool_name
from continuum.ttl import PaperRule, TtlInputs
from engine.messages import ToolCall
from engine.policy import Pin, PolicyContext, WaitingKey
from engine.request import Request
from estimator.tool_key import ToolKey
from eval.baselines.holding import GRACE_S, HoldingPolicy
from eval.baselines.knowledge import Knowledge

NO_TOOL = ToolKey(("no tool",))


class PaperPolicy(HoldingPolicy):
    """τ = argmax P(τ, f)·(T̄·η + PrefillReload) − τ over the gaps seen after tool f.

    Whoever cannot be given its blocks breaks pins, the latest program's first, until it fits.
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

    def ttl_s(self, frontier: Frontier, request: Request | None, now: float) -> float:
        if frontier.tools is None:
            return GRACE_S
        inputs = TtlInputs(
            curve=self._gaps[frontier.tools[0]].curve(),
            global_curve=self._all_gaps.curve(),
            num_blocks=len(frontier.chain),
            prefill_s=self._prefill_or_reload_s(len(frontier.chain) * self._block_size),
            queue_delay_s=self._queue_delay.mean_s,
            memoryfulness=self._memoryfulness.value,
            called_tools=frontier.tools[0] is not NO_TOOL,
        )
        return self._rule.choose_ttl(inputs).ttl_s

    def _prefill_or_reload_s(self, num_tokens: int) -> float:
        reload_s = self._knowledge.reload_s(num_tokens)
        return self._knowledge.prefill_s(num_tokens) if reload_s is None else reload_s

    def tools_known(self, frontier: Frontier, calls: Sequence[ToolCall], now: float) -> None:
        name = tool_name(calls)
        frontier.tools = [NO_TOOL if name is None else ToolKey((name,))]
        super().tools_known(frontier, calls, now)

    def gap_over(self, turn: Turn, frontier: Frontier, gap_s: float, now: float) -> None:
        super().gap_over(turn, frontier, gap_s, now)
        self._all_gaps.observe(gap_s)
        if frontier.tools:
            self._gaps[frontier.tools[0]].observe(gap_s)

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        turn = self._turns.get(request.request_id)
        evicted = turn is not None and turn.frontier is not None and not turn.warm
        if evicted and request.num_preemptions == 0:
            self._queue_delay.observe(now - request.arrival_time)
        return super().on_admitted(request, now)

    def program_over(self, job: Job, now: float) -> None:
        self._memoryfulness.observe_job(job.num_turns)

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return waiting_key(request, self._turns.get(request.request_id))

    def breakable(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        return self.pins_to_break(requester)
