"""What the last chunks of a streamed answer hold, whoever reads the stream and whatever else it looks for."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.messages import TurnReceipt

Count = Annotated[int, msgspec.Meta(ge=0)]


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class ChunkUsage(msgspec.Struct):
    """Tokens of the whole answer, and what our server says it did for its job."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    receipt: TurnReceipt | None = None


class ChunkError(msgspec.Struct):
    """An error after the stream had begun."""

    message: str = "an error without a message"
