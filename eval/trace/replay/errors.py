"""Errors for traces that cannot be replayed."""

from __future__ import annotations

from tracing.events import TraceHeader
from tracing.header_limits import not_told
from tracing.reader import TraceError


class NotReplayableError(TraceError):
    """A sentence about the trace, which does not name it."""


def check_tells_engine(header: TraceHeader) -> None:
    """Raises NotReplayableError if the header lacks what an engine is made from."""
    untold = not_told(
        header, "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"
    )
    if untold is not None:
        raise NotReplayableError(f"{untold}, for an engine to be made of it")
