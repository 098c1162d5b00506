"""What happened to the KV in the gaps after each kind of call. Memory is bounded, whatever clients name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from eval.trace.analysis.jobs import GapLife, PinLife, PinOutcome
from eval.trace.page.page_data import ToolData
from eval.trace.page.sample import Sample, evenly, quantile
from eval.trace.page.strings import Strings

MAX_TOOLS = 1000
"""Most kinds of calls that are distinguished while a trace is read."""
MAX_SHOWN = 150
SAMPLED_GAPS = 4096
"""Gaps sampled per kind of call, for its quantiles."""
SHOWN_POINTS = 6000
"""Points shown for all kinds of calls together."""
MAX_PENDING = 50_000
"""Most gaps that wait for their pin, or pins that wait for their gap."""
NAME_LENGTH = 120
NO_PIN = "none"
OTHERS = "(other calls)"


@dataclass(frozen=True, slots=True)
class Point:
    """A gap that ended, and the time granted to its pin."""

    gap_s: float
    granted_s: float
    outcome: str
    job_id: str


@dataclass(slots=True)
class _Tool:
    points: Sample[Point] = field(default_factory=lambda: Sample(SAMPLED_GAPS))
    outcomes: Counter[str] = field(default_factory=Counter)
    num_gaps: int = 0
    spared_s: float = 0.0
    held_block_s: float = 0.0
    vain_block_s: float = 0.0

    def add(self, gap: GapLife, pin: PinLife | None) -> None:
        outcome = NO_PIN if pin is None else pin.outcome.value
        if gap.duration_s is not None:
            self.num_gaps += 1
            granted_s = 0.0 if pin is None or pin.outcome is PinOutcome.REFUSED else pin.granted_s
            self.points.add(Point(gap.duration_s, granted_s, outcome, gap.job_id))
        if pin is None and gap.duration_s is None:
            return
        self.outcomes[outcome] += 1
        if pin is not None:
            self.spared_s += pin.spared_s or 0.0  # unknown savings are not counted
            self.held_block_s += pin.block_s
            self.vain_block_s += pin.vain_block_s


def call_name(tools: tuple[str, ...] | None) -> str:
    """Returns the calls as one name; parallel calls of one tool count as one."""
    if tools is None:
        return "(not told)"
    name = " + ".join(sorted(set(tools))) or "(nothing called)"
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


class ToolGaps:
    """Takes gaps and pins in any order and joins those of one turn."""

    def __init__(self) -> None:
        self._tools: dict[str, _Tool] = {}
        self._gaps: dict[str, GapLife] = {}
        self._pins: dict[str, PinLife] = {}

    def gap(self, gap: GapLife) -> None:
        pin = self._pins.pop(gap.req_id, None)
        if pin is not None:
            self._join(gap, pin)
            return
        self._gaps[gap.req_id] = gap
        if len(self._gaps) > MAX_PENDING:
            self._join(self._gaps.pop(next(iter(self._gaps))), None)

    def pin(self, pin: PinLife) -> None:
        gap = self._gaps.pop(pin.req_id, None)
        if gap is not None:
            self._join(gap, pin)
            return
        self._pins[pin.req_id] = pin
        if len(self._pins) > MAX_PENDING:
            del self._pins[next(iter(self._pins))]

    def close(self) -> None:
        """Completes the gaps that have no pin."""
        for gap in self._gaps.values():
            self._join(gap, None)
        self._gaps.clear()

    def _join(self, gap: GapLife, pin: PinLife | None) -> None:
        name = call_name(gap.tools)
        if name not in self._tools and len(self._tools) >= MAX_TOOLS:
            name = OTHERS
        self._tools.setdefault(name, _Tool()).add(gap, pin)

    @property
    def num_left_out(self) -> int:
        """Number of kinds of calls that ``tools`` leaves out."""
        return max(0, len(self._tools) - MAX_SHOWN)

    @property
    def num_points_left_out(self) -> int:
        """Number of ended gaps without a point."""
        shown = self._shown()
        each = _points_of_each(shown)
        return sum(tool.num_gaps - min(len(tool.points.items), each) for _, tool in shown)

    def tools(self, strings: Strings) -> list[ToolData]:
        """Returns the kinds of calls with the most gaps first."""
        shown = self._shown()
        each = _points_of_each(shown)
        return [_tool_data(name, tool, each, strings) for name, tool in shown]

    def _shown(self) -> list[tuple[str, _Tool]]:
        tools = sorted(self._tools.items(), key=lambda entry: (-sum(entry[1].outcomes.values()), entry[0]))
        return [(name, tool) for name, tool in tools if tool.outcomes][:MAX_SHOWN]


def _points_of_each(tools: list[tuple[str, _Tool]]) -> int:
    """Returns the most points per kind of call; kinds with few gaps leave unused points to others."""
    room = SHOWN_POINTS
    most = 0
    for left, size in enumerate(sorted(len(tool.points.items) for _, tool in tools)):
        most = room // (len(tools) - left)
        room -= min(size, most)
    return most


def _tool_data(name: str, tool: _Tool, max_points: int, strings: Strings) -> ToolData:
    points = tool.points.items
    gaps_s = [point.gap_s for point in points]
    return ToolData(
        name=name,
        num_gaps=tool.num_gaps,
        gap_p50_s=quantile(gaps_s, 0.5),
        gap_p90_s=quantile(gaps_s, 0.9),
        granted_p50_s=quantile([point.granted_s for point in points], 0.5),
        outcomes=dict(tool.outcomes),
        spared_s=tool.spared_s,
        held_block_s=tool.held_block_s,
        vain_block_s=tool.vain_block_s,
        points=[
            (round(point.gap_s, 4), round(point.granted_s, 4), point.outcome, strings.number(point.job_id))
            for point in evenly(points, max_points)
        ],
    )
