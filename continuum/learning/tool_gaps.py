"""Learns the gaps after each tool as the published rules define them. It does not know pins.

Tenants are separate: a tenant's gaps do not affect other tenants.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from continuum.jobs.job import BranchTip
from engine.records.messages import ToolCall
from estimator.survival import NOTHING_KNOWN, SurvivalCurve
from estimator.tool_key import SHELL_TOOLS


class _ShellCall(msgspec.Struct):
    command: str | list[str] = ""


_shell_call = msgspec.json.Decoder(_ShellCall)


def tool_name(calls: Sequence[ToolCall]) -> str | None:
    """The tool of a turn with exactly one call: a function's name, or a shell's first word; else None.

    The preview reads mini-swe-agent's one bash block this way, and the paper (section 5.1) function calls; so
    ``cd x && pytest`` is ``cd``.
    """
    if len(calls) != 1:
        return None
    call = calls[0]
    if call.name.lower() not in SHELL_TOOLS:
        return call.name
    words = _shell_words(call.arguments)
    return words[0] if words else call.name


def _shell_words(arguments: str) -> list[str]:
    """Words of the command in JSON arguments, or of bare shell text."""
    try:
        command = _shell_call.decode(arguments).command
    except (ValueError, RecursionError):
        command = arguments
    return command.split() if isinstance(command, str) else command


class MeanGaps:
    """The running mean of the gaps after each tool."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def observe(self, tool: str, gap_s: float) -> None:
        count, total_s = self._sums[tool]
        self._sums[tool] = (count + 1, total_s + gap_s)

    def mean_s(self, tool: str) -> float | None:
        """Mean gap after a tool; None for a tool never seen."""
        if tool not in self._sums:
            return None
        count, total_s = self._sums[tool]
        return total_s / count


class ObservedGaps:
    """All observed gaps, as an empirical distribution: P(D <= t) steps up at each of them."""

    def __init__(self) -> None:
        self._gaps_s = array("d")
        self._curve: SurvivalCurve | None = NOTHING_KNOWN

    def observe(self, gap_s: float) -> None:
        insort(self._gaps_s, gap_s)
        self._curve = None

    def curve(self) -> SurvivalCurve:
        """The curve, which is exact at the observed gaps."""
        if self._curve is None:
            # A curve begins at 0, so a gap of 0 counts as the shortest possible gap.
            num_gaps = len(self._gaps_s)
            last = {max(gap_s, 1e-9): place for place, gap_s in enumerate(self._gaps_s, start=1)}
            reached = [place / num_gaps for place in last.values()]
            self._curve = SurvivalCurve((0.0, *last), (0.0, *reached), num_gaps)
        return self._curve


class PublishedGaps:
    """All gaps after the turns of one engine, by tenant."""

    def __init__(self) -> None:
        self._means: defaultdict[str | None, MeanGaps] = defaultdict(MeanGaps)
        self._gaps: defaultdict[tuple[str | None, str | None], ObservedGaps] = defaultdict(ObservedGaps)
        """Observed gaps by tenant and tool; the tool is None for a turn with none or several."""
        self._all_gaps: defaultdict[str | None, ObservedGaps] = defaultdict(ObservedGaps)

    def returned(self, tip: BranchTip, gap_s: float) -> None:
        """Records that the next turn came after this many seconds."""
        tenant = tip.job.tenant
        tool = tip.plain_tool
        if tool is not None:
            self._means[tenant].observe(tool, gap_s)
        self._gaps[tenant, tool].observe(gap_s)
        self._all_gaps[tenant].observe(gap_s)

    def mean_s(self, tip: BranchTip) -> float | None:
        """Mean of the gaps after its tool; None before any gap, and without a tool."""
        tool = tip.plain_tool
        return None if tool is None else self._means[tip.job.tenant].mean_s(tool)

    def curve(self, tip: BranchTip) -> SurvivalCurve:
        """The curve of gaps after its tool."""
        return self._gaps[tip.job.tenant, tip.plain_tool].curve()

    def curve_of_all(self, tip: BranchTip) -> SurvivalCurve:
        """The curve of all gaps of its tenant."""
        return self._all_gaps[tip.job.tenant].curve()
