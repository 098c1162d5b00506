"""Response bodies and stream events of the Messages API, as structs that encode fast."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.openai.bodies import Receipt


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw
    """The arguments as a JSON object, as the model wrote them."""


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class CacheCreation(msgspec.Struct):
    """The prompt tokens written to the cache, under the lifetime that the last breakpoint requests."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class CacheMissReason(msgspec.Struct):
    """Why an earlier prompt's prefix was not reused."""

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(msgspec.Struct):
    """``cache_miss_reason`` is None while it is not known yet."""

    cache_miss_reason: CacheMissReason | None


class Usage(msgspec.Struct, kw_only=True):
    """Token counts; the three input counts add up to the prompt."""

    input_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    """The receipt of the turn: the cached, recomputed and pinned KV of its job."""


class Message(msgspec.Struct, kw_only=True):
    """A complete message, and (still empty) the first event of a streamed one."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    diagnostics: Diagnostics | UnsetType | None = UNSET
    """None if nothing diverged; omitted if it was not requested."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """The response of count_tokens."""

    input_tokens: int


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(msgspec.Struct, tag="message_start"):
    message: Message


class Ping(msgspec.Struct, tag="ping"):
    pass


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: StopDelta
    usage: Usage


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
Event = MessageStart | Ping | BlockEvent | MessageDelta | MessageStop
