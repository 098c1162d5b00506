"""Step times that can be added by hand."""

from __future__ import annotations

from dataclasses import dataclass

from eval.sim.cost_model import StepWork


@dataclass(frozen=True, slots=True)
class PlainCost:
    """A step takes ``step_overhead_s`` plus ``token_s`` per computed token; nothing else takes time."""

    step_overhead_s: float = 1.0
    token_s: float = 0.0
    arrival_overhead_s: float = 0.0
    reply_overhead_s: float = 0.0
    kv_bytes_per_token: int = 1

    def step_s(self, work: StepWork) -> float:
        num_tokens = work.num_decodes + sum(new_tokens for new_tokens, _ in work.prefills)
        return self.step_overhead_s + self.token_s * num_tokens

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        return self.step_overhead_s + self.token_s * num_tokens

    def copy_s(self, num_tokens: int) -> float:
        return self.token_s * num_tokens / 10

    def notes(self) -> list[str]:
        return ["step times: made up"]
