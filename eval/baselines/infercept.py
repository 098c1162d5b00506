"""infercept: preserve, discard or swap at each interception, whichever wastes least (arXiv 2402.01869)."""

from __future__ import annotations

from collections.abc import Iterable

from continuum.jobs.job import BranchTip, Turn
from engine.core.policy import Pin, PolicyContext
from engine.core.request import Request
from eval.baselines.knowledge import Knowledge
from eval.baselines.tool_means import ToolMeanPolicy


class InferceptPolicy(ToolMeanPolicy):
    """Compares wasted memory, in tokens times seconds, with C tokens of this turn, C_other of the other
    running ones: preserve T_int·C; discard T_fwd(C)·C + T_fwd(C)·C_other; swap 2·T_swap(C)·(C + C_other).

    T_int is the tool's mean gap so far, 0 for a new tool, and never less than the time already passed: KV is
    preserved until that has wasted as much as the best alternative would have. To swap is to evict where a
    host tier has the blocks. A request keeps its program's arrival time.
    """

    name = "infercept"

    def __init__(self, context: PolicyContext, knowledge: Knowledge) -> None:
        super().__init__(context)
        self._knowledge = knowledge
        self._running: dict[str, Request] = {}
        self._break_even_s: dict[str, float] = {}
        """Break-even times of branch tips that are not continued yet, by request id."""

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        if request is not None:
            self._break_even_s[request.request_id] = self._least_waste_s(request)
            return self._break_even_s[request.request_id]
        break_even_s = self._break_even_s[tip.request_id]
        mean_s = self.mean_gap_s(tip) or 0.0
        return break_even_s if mean_s <= break_even_s else 0.0

    def _least_waste_s(self, request: Request) -> float:
        """Returns the smaller waste of discarding and swapping, in seconds of preserving."""
        own = request.num_computed_tokens
        if not own:
            return 0.0  # it ended before its first step: nothing to preserve
        other = sum(r.num_computed_tokens for r in self._running.values() if r is not request)
        waste = self._knowledge.prefill_s(own) * (own + other)
        swap_s = self._knowledge.reload_s(own)
        if swap_s is not None:
            waste = min(waste, 2 * swap_s * (own + other))
        return waste / own

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        self._running[request.request_id] = request
        return super().on_admitted(request, now)

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        pin = super().on_turn_end(request, now)
        self._running.pop(request.request_id, None)
        return pin

    def on_request_gone(self, request: Request, now: float) -> None:
        self._running.pop(request.request_id, None)
        super().on_request_gone(request, now)

    def gap_over(self, turn: Turn, tip: BranchTip, gap_s: float, now: float) -> None:
        super().gap_over(turn, tip, gap_s, now)
        self._break_even_s.pop(tip.request_id, None)

    def drop(self, tip: BranchTip) -> None:
        super().drop(tip)
        self._break_even_s.pop(tip.request_id, None)
