"""Sums over a whole trace: the figures at the head of a page."""

from __future__ import annotations

from dataclasses import dataclass, field

from eval.trace.analysis.draft_facts import DraftFacts
from eval.trace.analysis.jobs import GapLife, PinLife, PinOutcome, TurnEnd, TurnLife
from eval.trace.analysis.phases import Seconds
from eval.trace.analysis.pool import StepLife
from eval.trace.analysis.trace_totals import JobTimes, TraceTotals
from eval.trace.analysis.writing import percent
from eval.trace.page.job_book import Sketch
from eval.trace.page.page_data import Figure
from eval.trace.page.sample import Sample, quantile

SAMPLED_TURNS = 10_000
KINDS = (
    "queue",
    "memory",
    "grammar",
    "load",
    "prefill",
    "recompute",
    "decode",
    "preempted",
    "tool",
    "client",
)
"""The kinds of seconds, in the order in which a turn passes through them."""


def by_kind(seconds: Seconds) -> list[float]:
    """Returns seconds in the order of ``KINDS``."""
    return [round(getattr(seconds, f"{kind}_s"), 4) for kind in KINDS]


@dataclass(slots=True)
class Totals:
    """The sums that a page shows for a whole trace."""

    trace: TraceTotals = field(default_factory=TraceTotals)
    jobs: JobTimes = field(default_factory=JobTimes)
    ttft_s: Sample[float] = field(default_factory=lambda: Sample(SAMPLED_TURNS))

    def turn(self, turn: TurnLife) -> None:
        self.trace.turn(turn)
        self.jobs.turn(turn)
        if turn.ttft_s is not None and turn.arrival_told:
            self.ttft_s.add(turn.ttft_s)

    def gap(self, gap: GapLife) -> None:
        self.jobs.gap(gap)

    def pin(self, pin: PinLife) -> None:
        self.trace.pin(pin)

    def step(self, step: StepLife) -> None:
        self.trace.step(step)

    def close(self) -> None:
        self.trace.close()

    def figures(self, sketches: dict[str, Sketch], duration_s: float, seconds: Seconds) -> list[Figure]:
        """Returns the most important figures. ``seconds``: the jobs' time by kind."""
        trace = self.trace
        pool = self.trace.pool.shares
        done = [sketch.wall_s for sketch in sketches.values() if not sketch.is_open]
        return [
            _figure("jobs", f"{len(sketches):,}", note=f"{trace.num_turns:,} turns"),
            _seconds(
                "mean job time", sum(done) / len(done) if done else None, "first arrival to last answer"
            ),
            _seconds("median first token", quantile(self.ttft_s.items, 0.5), self._slowest_first_tokens()),
            _share("of the jobs' time, waiting", seconds.waited_s, seconds.total_s, self._turns_waited()),
            _share("prompt tokens from cache", trace.cached_tokens, trace.prompt_tokens, self._recomputed()),
            _figure(
                "output",
                f"{trace.output_tokens / duration_s:,.0f}" if duration_s else "–",
                "tokens/s",
                self._drafts(),
            ),
            self._pins(),
            _share("wasted pins", trace.vain_block_s, trace.held_block_s, "of pinned blocks times seconds"),
            _share(
                "pool in use",
                pool.in_use if pool else 0.0,
                float(pool is not None),
                "running or pinned, mean",
            ),
            _figure(
                "preemptions",
                f"{trace.num_preemptions:,}",
                note=f"{trace.turns_by_end[TurnEnd.ABORTED]:,} turns aborted",
            ),
        ]

    def _turns_waited(self) -> str:
        waited_s = self.trace.turns_waited_s
        longest_s = self.trace.longest_wait_s
        return f"all turns together {waited_s:,.2f} s, one of them {longest_s:,.2f} s"

    def _slowest_first_tokens(self) -> str:
        slow_s = quantile(self.ttft_s.items, 0.95)
        return "" if slow_s is None else f"95 % within {slow_s:,.2f} s"

    def _recomputed(self) -> str:
        return f"{self.trace.recomputed_tokens:,} known tokens recomputed"

    def _drafts(self) -> str:
        drafts = DraftFacts.of(self.trace.drafts, self.trace.output_tokens)
        if drafts is None:
            return ""
        share = percent(drafts.accepted_tokens, drafts.drafted_tokens)
        return f"{drafts.tokens_per_step:.2f} a step of a request, {share} of draft tokens accepted"

    def _pins(self) -> Figure:
        held = sum(self.trace.pins.values()) - self.trace.pins[PinOutcome.REFUSED]
        note = ", ".join(
            f"{self.trace.pins[outcome]:,} {outcome.value}"
            for outcome in (PinOutcome.EXPIRED, PinOutcome.REVOKED, PinOutcome.REFUSED)
            if self.trace.pins[outcome]
        )
        handed_over = self.trace.pins[PinOutcome.HANDED_OVER]
        return _share("pins handed over", handed_over, held, f"of {held:,}" + (f"; {note}" if note else ""))


def _figure(label: str, value: str, unit: str = "", note: str = "") -> Figure:
    return Figure(label=label, value=value, unit=unit, note=note)


def _seconds(label: str, seconds: float | None, note: str) -> Figure:
    if seconds is None:
        return _figure(label, "–", note=note)
    return _figure(label, f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2f}", "s", note)


def _share(label: str, part: float, whole: float, note: str) -> Figure:
    return _figure(label, f"{100 * part / whole:.1f}", "%", note) if whole else _figure(label, "–", note=note)
