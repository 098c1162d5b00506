"""Why a trace cannot be replayed."""

from __future__ import annotations

from tracing.reader import TraceError


class NotReplayableError(TraceError):
    """A sentence about the trace, which does not name it."""
