"""Bounds what a template may do: it is a program, maybe a stranger's, and one that loops in loops would run
for ever on a thread that nobody can end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError

MAX_ITERATIONS = 5_000_000
"""How many turns all loops of one rendering have together: a long history takes thousands."""
MAX_REPEATED = 1_000_000
"""Most items or characters that ``*`` makes of a list or a text, and the largest power's exponent."""
FILTER = "_counted"

_left: ContextVar[list[int] | None] = ContextVar("iterations_left", default=None)


def begin() -> None:
    """A rendering begins on this thread."""
    _left.set([MAX_ITERATIONS])


def count_loops(tree: nodes.Template) -> None:
    """Have each loop of a template count its turns. Before it is compiled."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, FILTER, [], [], None, None, lineno=loop.lineno)


def counted(items: Iterable[Any]) -> Iterable[Any]:
    """The same items. SecurityError where the loops of a rendering have had too many turns."""
    left = _left.get()
    if left is None:
        return items
    try:
        number = len(items)  # type: ignore[arg-type]
    except TypeError:
        return _counted_one_by_one(items, left)
    _take(left, number)
    return items


def _counted_one_by_one(items: Iterable[Any], left: list[int]) -> Iterator[Any]:
    for item in items:
        _take(left, 1)
        yield item


def _take(left: list[int], number: int) -> None:
    left[0] -= number
    if left[0] < 0:
        raise SecurityError(f"the loops of the template have more than {MAX_ITERATIONS:,} turns")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """SecurityError for a product or a power that would fill the memory."""
    if operator == "**" and isinstance(right, int | float) and abs(right) > 1000:
        raise SecurityError("a power in the template is too large")
    for items, times in ((left, right), (right, left)):
        repeats = operator == "*" and isinstance(items, str | list | tuple) and isinstance(times, int)
        if repeats and len(items) * times > MAX_REPEATED:
            raise SecurityError("a text or a list in the template is repeated too often")
