"""Response bodies and stream chunks in OpenAI's format, as structs that encode fast."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.records.messages import TurnReceipt

Receipt = dict[str, str | int | float | list[str] | None]
"""A TurnReceipt with all fields, including defaults, and notes of what the model was not shown."""


def receipt_fields(receipt: TurnReceipt | None, left_out: list[str]) -> Receipt | UnsetType:
    """The receipt for ``usage``; unset without one."""
    fields: Receipt = {} if receipt is None else msgspec.structs.asdict(receipt)
    if left_out:
        fields["left_out"] = left_out
    return fields or UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    """The receipt of the turn: the cached, recomputed and pinned KV of its job."""


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCallItem(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class PromptLogprob(msgspec.Struct):
    """Log-probability of a prompt token, or of an alternative."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The log-probabilities of a prompt by position and token id, in vLLM's format; None for the first."""


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The reasoning under its older name, since clients read one or the other."""
    tool_calls: list[ToolCallItem] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    """See ``encoded_experts``."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    """Only if the request names one; so in chunks."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallItemDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallItemDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    """None for the first token of a prompt that is repeated."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    """See ``encoded_experts``; not in streams."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, and also each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class MediaPlace(msgspec.Struct):
    """Where the tokens of a picture or clip are in a prompt."""

    offset: int
    length: int


class MediaFeatures(msgspec.Struct):
    """The pictures and clips of a rendered prompt by kind, in V1's format. The hashes are those in the
    ``extra_keys`` of KV events."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[MediaPlace]]


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """A prompt as the engine would get it: V1's answer of its render endpoints."""

    request_id: str
    token_ids: list[int]
    features: MediaFeatures | None
    sampling_params: dict[str, Any]
    """The parameters of the generation under V1's names."""
    model: str
    stream: bool
    stream_options: dict[str, bool] | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class TokensChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    routed_experts: str | UnsetType = UNSET
    """See ``encoded_experts``; not in streams."""


class Generated(msgspec.Struct, kw_only=True):
    """V1's answer with token ids, and also each chunk of a streamed one."""

    request_id: str
    model: str
    created: int
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    choices: list[TokensChoice]


class ModelCard(msgspec.Struct, kw_only=True):
    """A model's description for clients of OpenAI and of Anthropic."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: datetime
    owned_by: str = "continuum"
    root: str
    parent: str | None = None
    """The base model of an adapter."""
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
