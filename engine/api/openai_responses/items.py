"""The parts of a response on the wire: output items, token counts and the response itself.

Items are never mutated: a stream sends each one empty when it begins and complete when it is done.
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.openai.bodies import ChatTokenLogprob, Receipt
from engine.api.openai_responses.prompt_cache import PromptCacheDiagnostics

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

ENDED: frozenset[str] = frozenset(("completed", "incomplete", "failed", "cancelled"))
"""Final states of a response."""


class OutputText(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="output_text"):
    """Text of a message. There are no annotations; the list exists because clients read it."""

    text: str = ""
    annotations: list[str] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="reasoning_text"):
    """Reasoning text."""

    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning. There is no summary, so ``summary`` is empty."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[str] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function; ``arguments`` is its JSON text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCallItem(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; ``input`` is free text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Token counts, and the receipt of the turn."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    receipt: Receipt | UnsetType = UNSET


class ResponseError(msgspec.Struct, kw_only=True, frozen=True):
    """Why a response failed."""

    code: str
    message: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class ConversationId(msgspec.Struct, frozen=True):
    """The conversation that a response belongs to."""

    id: str


class ReasoningConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The requested reasoning effort."""

    effort: str | None = None
    summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The requested text format, as the client sent it."""

    format: dict[str, Any]
    verbosity: str | None = None


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """A response: its request, its output so far, and its end."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | UnsetType = UNSET
    prompt_cache_retention: str | UnsetType = UNSET
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET
    reasoning: ReasoningConfig = ReasoningConfig()
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, Any] = {}
    warnings: list[str] | UnsetType = UNSET
    """Notes on parts of the request that have no effect; not a field of OpenAI's."""
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    """Parameters that a proxy passes to the server that continues; vLLM's field."""


def new_response_id() -> str:
    """Returns a random id: who knows it can read the response."""
    return f"resp_{uuid4().hex}"


def item_id(kind: str, response_id: str, number: int) -> str:
    """The id of item ``number``. It contains the response's id, so that references to the item can be
    resolved. ``kind`` is OpenAI's prefix for that item type."""
    return f"{kind}_{response_id.removeprefix('resp_')}{number:04x}"


def response_of_item(referenced: str) -> str | None:
    """The id of the response that an item belongs to; None if the item's id is not from this server."""
    _, _, rest = referenced.rpartition("_")
    return f"resp_{rest[:32]}" if len(rest) >= 36 else None
