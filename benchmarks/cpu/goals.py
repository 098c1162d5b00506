"""Goals for the engine on two cores: relative to the best other server, or absolute."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cpu.cases import Figure


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of a figure, or of its ratio to the figure of the best other server."""

    bound: float
    of_ratio: bool = True

    def told(self, figure: Figure) -> str:
        sign = "<=" if figure.less_is_better else ">="
        if self.of_ratio:
            return f"{sign} {self.bound:.2f}x best"
        return f"{sign} {self.bound:,.{2 if self.bound < 2 else 0}f}"

    def met_by(self, value: float, figure: Figure) -> bool:
        """``value`` is the ratio ours / best, or our figure."""
        return value <= self.bound if figure.less_is_better else value >= self.bound


GOALS = {
    ("small", "decode_b1_tok_s"): Goal(1.0),
    ("small", "decode_b8_tok_s"): Goal(1.25),
    ("small", "decode_b32_tok_s"): Goal(1.4),
    **{("small", f"sampled_{number}_b32_cost"): Goal(1.08, of_ratio=False) for number in range(3)},
    **{("tiny", f"sampled_{number}_b32_cost"): Goal(1.05, of_ratio=False) for number in range(3)},
    ("small", "prefill_tok_s"): Goal(1.0),
    ("small", "prefix_second_ms"): Goal(0.7),
    ("small", "start_s"): Goal(5.0, of_ratio=False),
    ("tiny", "decode_b1_tok_s"): Goal(1.0),
    ("tiny", "decode_b8_tok_s"): Goal(1.0),
    ("tiny", "decode_b32_tok_s"): Goal(1.0),
    ("tiny", "http_c1_req_s"): Goal(1.0),
    ("tiny", "http_c32_req_s"): Goal(2.0),
    **{
        (model, figure): Goal(1.2 if (model, figure) == ("moe-1.5b", "decode_b8_tok_s") else 1.0)
        for model in ("moe-1.5b", "gpt-oss-1b", "gemma-270m")
        for figure in (
            "decode_b1_tok_s",
            "decode_b8_tok_s",
            "decode_b32_tok_s",
            "prefill_tok_s",
            "prefix_second_ms",
        )
    },
}
"""Goals by model and figure."""
OVERHEAD_MB = 300
"""Memory that a server may use in addition to its weights and its KV pool."""


def memory_goal(weight_bytes: int, kv_bytes: int) -> Goal:
    return Goal((weight_bytes + kv_bytes) / 1e6 + OVERHEAD_MB, of_ratio=False)
