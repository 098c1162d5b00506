"""The usage and error chunks of a streamed response, for all readers of streams."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.records.messages import TurnReceipt

Count = Annotated[int, msgspec.Meta(ge=0)]


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class ChunkUsage(msgspec.Struct):
    """Token counts of the whole response, and our server's receipt."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    receipt: TurnReceipt | None = None


class ChunkError(msgspec.Struct):
    """An error that occurs after the stream has begun."""

    message: str = "an error without a message"
