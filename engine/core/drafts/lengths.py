"""How many drafts a step gets: as many as bring more than they cost.

A draft is a row of a step, whether it is accepted or not. Drafts of all requests are taken by falling chance:
with c(n) the seconds of a step of n rows and p(i) the chance of the i-th likeliest draft, m drafts are best
where (n + p(1) + .. + p(m)) / c(n + m) is highest. Under load a row costs what it always costs, n is large,
and m = 0 is best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MIN_CHANCE = 0.1
"""Below this a draft is never verified, however little a row costs."""
MIN_GAIN = 1.02
"""A step has drafts if they are expected to bring so much more than none: costs and chances are estimates."""
PRIOR_TOKENS = 4.0
"""The drafters' chances count as so many accepted drafts in a request's record."""
MEMORY = 0.97
"""What a step leaves of the record of those before it."""


class _Line:
    """Seconds by rows: straight between what was measured, and behind it."""

    def __init__(self, seconds: Sequence[tuple[int, float]]) -> None:
        """Pairs by rising rows, two at least. What costs less than fewer rows is noise."""
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
        rows, seconds = self.rows, self._seconds
        right = min(max(1, bisect_left(rows, num_rows)), len(rows) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
        return seconds[left] + slope * max(0, num_rows - rows[left])


class StepCosts:
    """Seconds of a decode step, as they were measured."""

    def __init__(
        self, drafted: Sequence[tuple[int, float]], plain: Sequence[tuple[int, float]] | None = None
    ) -> None:
        """Pairs of rows and seconds by rising rows, two at least: of steps with drafts, and of steps without.

        ``plain`` None: a step costs the same with drafts among its rows.
        """
        self._drafted = _Line(drafted)
        self._plain = self._drafted if plain is None else _Line(plain)

    def plain(self, num_rows: int) -> float:
        """Seconds of a step of so many requests that have no drafts."""
        return self._plain.at(num_rows)

    def drafted(self, num_rows: int) -> float:
        """Seconds of a step of so many rows, some of which are drafts."""
        return self._drafted.at(num_rows)

    def may_pay(self, num_rows: int, most: int) -> bool:
        """Whether up to ``most`` drafts would pay that are sure to be accepted.

        Between measured points the rate of a line rises or falls all the way, so only they are looked at.
        """
        least = MIN_GAIN * num_rows / self.plain(num_rows)
        ends = num_rows + 1, num_rows + most
        knots = (rows for rows in self._drafted.rows if ends[0] < rows < ends[1])
        return any(rows > least * self.drafted(rows) for rows in (*ends, *knots))


def best_lengths(
    chances: Sequence[Sequence[float]], num_rows: int, costs: StepCosts | None, max_rows: int
) -> list[int]:
    """How many drafts of each request to verify, given their chances, which never rise.

    The step has ``num_rows`` rows without drafts, and at most ``max_rows`` with them. Without costs: those
    that are likely enough.
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
    best, best_rate = 0, MIN_GAIN * num_rows / costs.plain(num_rows)
    brought = float(num_rows)
    for count, (negative, _) in enumerate(ranked, start=1):
        brought -= negative
        rate = brought / costs.drafted(num_rows + count)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


@dataclass(slots=True)
class _Record:
    """What became of a request's drafts lately."""

    accepted: float = PRIOR_TOKENS
    expected: float = PRIOR_TOKENS
    pending: float = 0.0
    """Expected of the drafts under way."""


class AcceptanceRecords:
    """For each request: how its acceptance compares with the chances that its drafter gave."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def corrected(self, request_id: str, chances: Sequence[float]) -> list[float]:
        """The chances of new drafts, after what became of those before."""
        record = self._records.setdefault(request_id, _Record())
        factor = record.accepted / record.expected
        return [min(1.0, factor * chance) for chance in chances]

    def proposed(self, request_id: str, chances: Sequence[float]) -> None:
        """Take the drafter's chances of the drafts that a request gets now, which may be none.

        A step without drafts brings a record back towards its drafter's chances, so that it is tried again.
        """
        record = self._records.setdefault(request_id, _Record())
        record.accepted += (1 - MEMORY) * (PRIOR_TOKENS - record.accepted)
        record.expected += (1 - MEMORY) * (PRIOR_TOKENS - record.expected)
        record.pending = sum(chances)

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Take how many of a request's drafts were accepted in a step."""
        record = self._records.get(request_id)
        if record is not None and num_drafts:
            record.accepted += num_accepted
            record.expected += record.pending
            record.pending = 0.0

    def ended(self, request_id: str) -> None:
        """The request has ended."""
        self._records.pop(request_id, None)
