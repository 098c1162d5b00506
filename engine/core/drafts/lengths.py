"""Chooses how many drafts a step verifies: as many as gain more than they cost.

A draft is a row of a step, whether it is accepted or not. Drafts of all requests are ranked by chance. With
c(n) the seconds of a step of n rows and p(i) the chance of the i-th likeliest draft, the best number m of
drafts maximizes (n + p(1) + .. + p(m)) / c(n + m). Under load n is large and every row costs time, so m = 0
is best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MIN_CHANCE = 0.1
"""A draft with a lower chance is never verified, however little a row costs."""
MIN_GAIN = 1.02
"""Smallest expected gain, as a ratio, for which a step has drafts: costs and chances are estimates."""
PRIOR_TOKENS = 4.0
"""Weight of the drafter's own chances in a request's record, in accepted drafts."""
MEMORY = 0.97
"""Share of a record that a step keeps; the rest returns to the drafter's chances."""


class _Line:
    """Seconds by rows, linear between the measured points and beyond the last one."""

    def __init__(self, seconds: Sequence[tuple[int, float]]) -> None:
        """Take two or more pairs, by rising rows. A cost below an earlier one is raised to it, as noise."""
        assert len(seconds) > 1, "one point makes no line"
        self.rows = [rows for rows, _ in seconds]
        self._seconds: list[float] = []
        for _, cost in seconds:
            self._seconds.append(max(cost, self._seconds[-1] if self._seconds else 0.0))
        self._known: dict[int, float] = {}

    def at(self, num_rows: int) -> float:
        cost = self._known.get(num_rows)
        if cost is None:
            cost = self._known[num_rows] = self._between(num_rows)
        return cost

    def _between(self, num_rows: int) -> float:
        rows = self.rows
        seconds = self._seconds
        right = min(max(1, bisect_left(rows, num_rows)), len(rows) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
        return seconds[left] + slope * max(0, num_rows - rows[left])


class StepCosts:
    """Seconds of a decode step, as they were measured."""

    def __init__(
        self, drafted: Sequence[tuple[int, float]], plain: Sequence[tuple[int, float]] | None = None
    ) -> None:
        """Take two or more pairs of rows and seconds, by rising rows, of steps with drafts and without.

        ``plain`` None: a step costs the same with drafts among its rows.
        """
        self._drafted = _Line(drafted)
        self._plain = self._drafted if plain is None else _Line(plain)

    def plain(self, num_rows: int) -> float:
        """Seconds of a step of ``num_rows`` requests that have no drafts."""
        return self._plain.at(num_rows)

    def drafted(self, num_rows: int) -> float:
        """Seconds of a step of ``num_rows`` rows, some of which are drafts."""
        return self._drafted.at(num_rows)

    def may_pay(self, num_rows: int, most: int) -> bool:
        """Whether up to ``most`` drafts would pay if all of them were accepted.

        The rate is monotonic between measured points, so only these and the ends are checked.
        """
        least = MIN_GAIN * num_rows / self.plain(num_rows)
        ends = num_rows + 1, num_rows + most
        knots = (rows for rows in self._drafted.rows if ends[0] < rows < ends[1])
        return any(rows > least * self.drafted(rows) for rows in (*ends, *knots))


def best_lengths(
    chances: Sequence[Sequence[float]], num_rows: int, costs: StepCosts | None, max_rows: int
) -> list[int]:
    """How many drafts of each request to verify, given their chances, which never rise.

    The step has ``num_rows`` rows without drafts, and at most ``max_rows`` with them. Without ``costs``, all
    drafts of at least ``MIN_CHANCE`` are verified.
    """
    ranked = sorted(
        (-chance, index) for index, each in enumerate(chances) for chance in each if chance >= MIN_CHANCE
    )
    del ranked[max(0, max_rows - num_rows) :]
    num_taken = len(ranked) if costs is None else _best_count(ranked, num_rows, costs)
    lengths = [0] * len(chances)
    for _, index in ranked[:num_taken]:
        lengths[index] += 1
    return lengths


def _best_count(ranked: Sequence[tuple[float, int]], num_rows: int, costs: StepCosts) -> int:
    best = 0
    best_rate = MIN_GAIN * num_rows / costs.plain(num_rows)
    brought = float(num_rows)
    for count, (negative, _) in enumerate(ranked, start=1):
        brought -= negative
        rate = brought / costs.drafted(num_rows + count)
        if rate > best_rate:
            best = count
            best_rate = rate
    return best


@dataclass(slots=True)
class _Record:
    """The recent acceptance of a request's drafts."""

    accepted: float = PRIOR_TOKENS
    expected: float = PRIOR_TOKENS
    pending: float = 0.0
    """Expected number of accepted drafts among those under way."""


class AcceptanceRecords:
    """Compares each request's acceptance with the chances that its drafter gave."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def corrected(self, request_id: str, chances: Sequence[float]) -> list[float]:
        """The chances of new drafts, corrected by the acceptance of earlier ones."""
        record = self._records.setdefault(request_id, _Record())
        factor = record.accepted / record.expected
        return [min(1.0, factor * chance) for chance in chances]

    def proposed(self, request_id: str, chances: Sequence[float]) -> None:
        """Record the drafter's chances of the drafts that a request gets now, which may be none.

        Each step moves a record back towards the drafter's chances, so that drafts are tried again.
        """
        record = self._records.setdefault(request_id, _Record())
        record.accepted += (1 - MEMORY) * (PRIOR_TOKENS - record.accepted)
        record.expected += (1 - MEMORY) * (PRIOR_TOKENS - record.expected)
        record.pending = sum(chances)

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a request's drafts were accepted in a step."""
        record = self._records.get(request_id)
        if record is not None and num_drafts:
            record.accepted += num_accepted
            record.expected += record.pending
            record.pending = 0.0

    def ended(self, request_id: str) -> None:
        """Drop the record of a request that has ended."""
        self._records.pop(request_id, None)
