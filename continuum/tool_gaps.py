"""How long programs stayed away after each tool, as the published rules count it. Knows nothing of pins."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.messages import ToolCall
from estimator.survival import NOTHING_KNOWN, SurvivalCurve
from estimator.tool_key import SHELL_TOOLS


class _ShellCall(msgspec.Struct):
    command: str | list[str] = ""


_shell_call = msgspec.json.Decoder(_ShellCall)


def tool_name(calls: Sequence[ToolCall]) -> str | None:
    """The tool of a turn with exactly one call: a function's name, a shell's first word; else None.

    As the preview reads mini-swe-agent's one bash block, and the paper (section 5.1) function calls; so
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
    """Of the command in JSON arguments, or of bare shell text."""
    try:
        command = _shell_call.decode(arguments).command
    except (ValueError, RecursionError):
        command = arguments
    return command.split() if isinstance(command, str) else command


class MeanGaps:
    """Running mean of the gaps after each tool."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def observe(self, tool: str, gap_s: float) -> None:
        count, total_s = self._sums[tool]
        self._sums[tool] = (count + 1, total_s + gap_s)

    def mean_s(self, tool: str) -> float | None:
        """None for a tool never seen."""
        if tool not in self._sums:
            return None
        count, total_s = self._sums[tool]
        return total_s / count


class ObservedGaps:
    """All gaps seen, as an empirical distribution: P(D <= t) steps up at each of them."""

    def __init__(self) -> None:
        self._gaps_s = array("d")
        self._curve: SurvivalCurve | None = NOTHING_KNOWN

    def observe(self, gap_s: float) -> None:
        insort(self._gaps_s, gap_s)
        self._curve = None

    def curve(self) -> SurvivalCurve:
        """Exact at the gaps that were seen."""
        if self._curve is None:
            # A curve begins at 0, so a gap of 0 counts as the shortest there is.
            gaps_s, counts = np.unique(np.maximum(np.array(self._gaps_s), 1e-9), return_counts=True)
            reached = np.cumsum(counts) / len(self._gaps_s)
            self._curve = SurvivalCurve((0.0, *gaps_s.tolist()), (0.0, *reached.tolist()), len(self._gaps_s))
        return self._curve
