"""Bounds what a template may do: it is a program, possibly from a stranger, and one with nested loops could
run forever on a thread that cannot be ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError

MAX_ITERATIONS = 5_000_000
"""Maximum number of iterations of all loops of one rendering together: a long history takes thousands."""
MAX_REPEATED = 1_000_000
"""Maximum number of items or characters in a list or a text repeated with ``*``."""
FILTER = "_counted"

_left: ContextVar[list[int] | None] = ContextVar("iterations_left", default=None)


def begin() -> None:
    """Starts counting for a rendering on this thread."""
    _left.set([MAX_ITERATIONS])


def count_loops(tree: nodes.Template) -> None:
    """Makes each loop of a template count its iterations. Call before compilation."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, FILTER, [], [], None, None, lineno=loop.lineno)


def counted(items: Iterable[Any]) -> Iterable[Any]:
    """Returns the same items. SecurityError if the loops of a rendering have had too many iterations."""
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
        raise SecurityError(f"the loops of the template have more than {MAX_ITERATIONS:,} iterations")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError for a product or a power that would fill the memory."""
    if operator == "**" and isinstance(right, int | float) and abs(right) > 1000:
        raise SecurityError("a power in the template is too large")
    for items, times in ((left, right), (right, left)):
        repeats = operator == "*" and isinstance(items, str | list | tuple) and isinstance(times, int)
        if repeats and len(items) * times > MAX_REPEATED:
            raise SecurityError("a text or a list in the template is repeated too often")
