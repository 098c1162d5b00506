"""Why a trace cannot be replayed."""

from __future__ import annotations

from tracing.events import TraceHeader
from tracing.header_limits import not_told
from tracing.reader import TraceError


class NotReplayableError(TraceError):
    """A sentence about the trace, which does not name it."""


def check_tells_engine(header: TraceHeader) -> None:
    """NotReplayableError if an engine cannot be made of what the header says."""
    untold = not_told(
        header, "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"
    )
    if untold is not None:
        raise NotReplayableError(f"{untold}, for an engine to be made of it")
