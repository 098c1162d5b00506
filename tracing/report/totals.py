"""Sums over all of a trace: the figures at the head of a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tracing.analysis.jobs import GapLife, PinLife, PinOutcome, TurnEnd, TurnLife
from tracing.analysis.phases import Seconds, seconds_of
from tracing.report.job_book import Sketch
from tracing.report.page_data import Figure
from tracing.report.sample import Sample, quantile

SAMPLED_TURNS = 10_000
KINDS = ("queue", "memory", "load", "prefill", "recompute", "decode", "preempted", "tool", "client")
"""What seconds are told apart into, in the order in which a turn goes through them."""


def by_kind(seconds: Seconds) -> list[float]:
    """In the order of ``KINDS``."""
    return [round(getattr(seconds, f"{kind}_s"), 4) for kind in KINDS]


@dataclass(slots=True)
class Totals:
    """Counts and sums; memory does not grow with the trace."""

    num_turns: int = 0
    num_aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    ttft_s: Sample[float] = field(default_factory=lambda: Sample(SAMPLED_TURNS))
    pins: Counter[PinOutcome] = field(default_factory=Counter)
    held_block_s: float = 0.0
    vain_block_s: float = 0.0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(KINDS))

    def turn(self, turn: TurnLife) -> None:
        self.num_turns += 1
        self.num_aborted += turn.end is TurnEnd.ABORTED
        self.prompt_tokens += turn.num_prompt_tokens if turn.started_s is not None else 0
        self.cached_tokens += turn.cached_tokens
        self.recomputed_tokens += turn.recomputed_tokens
        self.output_tokens += turn.num_output_tokens
        self.num_preemptions += turn.num_preemptions
        if turn.ttft_s is not None and turn.arrival_told:
            self.ttft_s.add(turn.ttft_s)
        self._add(turn.seconds)

    def gap(self, gap: GapLife) -> None:
        if gap.span is not None:
            self._add(seconds_of([gap.span]))

    def pin(self, pin: PinLife) -> None:
        self.pins[pin.outcome] += 1
        self.held_block_s += pin.block_s
        self.vain_block_s += 0.0 if pin.outcome is PinOutcome.HANDED_OVER else pin.block_s

    def _add(self, seconds: Seconds) -> None:
        self.seconds = [total + more for total, more in zip(self.seconds, by_kind(seconds), strict=True)]

    def figures(
        self, sketches: dict[str, Sketch], duration_s: float, pool_share: float | None
    ) -> list[Figure]:
        """What a reader wants to know first. ``pool_share``: of the pool, in use, mean over time."""
        done = [sketch.wall_s for sketch in sketches.values() if not sketch.is_open]
        waited_s = sum(self.seconds[KINDS.index(kind)] for kind in ("queue", "memory", "preempted"))
        return [
            _figure("jobs", f"{len(sketches):,}", note=f"{self.num_turns:,} turns"),
            _seconds(
                "mean job time", sum(done) / len(done) if done else None, "first arrival to last answer"
            ),
            _seconds("median first token", quantile(self.ttft_s.items, 0.5), self._slowest_first_tokens()),
            _share("time spent waiting", waited_s, sum(self.seconds), "in the queue, for memory, preempted"),
            _share("prompt tokens from cache", self.cached_tokens, self.prompt_tokens, self._recomputed()),
            _figure("output", f"{self.output_tokens / duration_s:,.0f}" if duration_s else "–", "tokens/s"),
            self._pins(),
            _share("held in vain", self.vain_block_s, self.held_block_s, "of pinned blocks times seconds"),
            _share(
                "pool in use", pool_share or 0.0, float(pool_share is not None), "running or pinned, mean"
            ),
            _figure("preemptions", f"{self.num_preemptions:,}", note=f"{self.num_aborted:,} turns aborted"),
        ]

    def _slowest_first_tokens(self) -> str:
        slow_s = quantile(self.ttft_s.items, 0.95)
        return "" if slow_s is None else f"95 % within {slow_s:,.2f} s"

    def _recomputed(self) -> str:
        return f"{self.recomputed_tokens:,} known tokens recomputed"

    def _pins(self) -> Figure:
        held = sum(self.pins.values()) - self.pins[PinOutcome.REFUSED]
        note = ", ".join(
            f"{self.pins[outcome]:,} {outcome.value}"
            for outcome in (PinOutcome.EXPIRED, PinOutcome.BROKEN, PinOutcome.REFUSED)
            if self.pins[outcome]
        )
        handed_over = self.pins[PinOutcome.HANDED_OVER]
        return _share("pins handed over", handed_over, held, f"of {held:,}" + (f"; {note}" if note else ""))


def _figure(label: str, value: str, unit: str = "", note: str = "") -> Figure:
    return Figure(label=label, value=value, unit=unit, note=note)


def _seconds(label: str, seconds: float | None, note: str) -> Figure:
    if seconds is None:
        return _figure(label, "–", note=note)
    return _figure(label, f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2f}", "s", note)


def _share(label: str, part: float, whole: float, note: str) -> Figure:
    return _figure(label, f"{100 * part / whole:.1f}", "%", note) if whole else _figure(label, "–", note=note)
