"""The files of the pages: style, scripts, and the one library that draws time series.

The report embeds them in its page and the dashboard serves them, so both look alike.
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def asset(name: str) -> str:
    """Returns the text of a file of this package, by its path within it."""
    return (resources.files("eval.trace.page") / name).read_text(encoding="utf-8")


def style(*names: str) -> str:
    """Concatenates style sheets: the shared tokens and uPlot's come first, then the page's own."""
    tokens = (resources.files("engine.api.dashboard") / "assets" / "tokens.css").read_text(encoding="utf-8")
    return "\n".join([tokens, *(asset(name) for name in ("vendor/uPlot.min.css", *names))])


def plotting() -> str:
    """Returns uPlot (MIT, 51 KB) with the notice that its license requires in every copy."""
    return f"/*!\n{asset('vendor/uPlot.LICENSE')}*/\n{asset('vendor/uPlot.iife.min.js')}"
