"""The log of a process of the server: lines that no name from a request can forge or colour."""

from __future__ import annotations

import logging
from typing import Any

from tracing.plain_text import plain_name, plain_text


class PlainFormatter(logging.Formatter):
    """A message is one line, its control characters as JSON writes them; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return plain_name(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return plain_text(super().formatException(ei))


start_log = logging.getLogger("continuum.start")
"""What a server says of itself while it starts, whatever its level: a large model takes minutes to load."""


def begin_log(level: int | str, who: str, *, tells_start: bool = True) -> None:
    """On stderr. ``who``: behind the name of the logger, such as ``core 123``."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(f"%(levelname)s %(name)s ({who}): %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if tells_start:
        tell_start()


def tell_start() -> None:
    """Of this process ``start_log`` is shown, in plain words."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(message)s"))
    start_log.handlers, start_log.propagate = [handler], False
    start_log.setLevel(logging.INFO)


def plain_log() -> None:
    """Of the process that the user started, which has no log of its own: its warnings go to stderr."""
    tell_start()
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(PlainFormatter("%(message)s"))
