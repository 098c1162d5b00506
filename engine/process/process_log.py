"""Logging of the server's processes. Names from requests can neither forge log lines nor color them."""

from __future__ import annotations

import logging
from typing import Any

from tracing.plain_text import plain_name, plain_text


class PlainFormatter(logging.Formatter):
    """Formats a message as one line, with control characters escaped as in JSON; tracebacks keep their
    lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return plain_name(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return plain_text(super().formatException(ei))


start_log = logging.getLogger("continuum.start")
"""Logs the progress of startup at any log level: a large model takes minutes to load."""


def begin_log(level: int | str, who: str, *, shows_start: bool = True) -> None:
    """Logs to stderr. ``who`` names the process, for example ``core 123``."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(f"%(levelname)s %(name)s ({who}): %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if shows_start:
        show_start_log()


def show_start_log() -> None:
    """Shows this process's ``start_log`` as plain text."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(message)s"))
    start_log.handlers = [handler]
    start_log.propagate = False
    start_log.setLevel(logging.INFO)


def plain_log() -> None:
    """Logs startup progress and warnings to stderr as plain text; for the process that the user started."""
    show_start_log()
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(PlainFormatter("%(message)s"))
