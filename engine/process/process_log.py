"""Logging of the server's processes: names from requests can neither forge lines nor color them."""

from __future__ import annotations

import logging
from typing import Any

from tracing.plain_text import plain_name, plain_text


class PlainFormatter(logging.Formatter):
    """Writes a message as one line, control characters escaped as in JSON; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return plain_name(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return plain_text(super().formatException(ei))


start_log = logging.getLogger("continuum.start")
"""Startup progress, shown at any log level: a large model takes minutes to load."""


def begin_log(level: int | str, who: str, *, tells_start: bool = True) -> None:
    """Log to stderr. ``who`` names the process, such as ``core 123``."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(f"%(levelname)s %(name)s ({who}): %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if tells_start:
        tell_start()


def tell_start() -> None:
    """Show ``start_log`` of this process as plain text."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(message)s"))
    start_log.handlers, start_log.propagate = [handler], False
    start_log.setLevel(logging.INFO)


def plain_log() -> None:
    """For the process that the user started: startup progress and warnings go to stderr as plain text."""
    tell_start()
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(PlainFormatter("%(message)s"))
