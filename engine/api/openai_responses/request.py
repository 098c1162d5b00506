"""Body of POST /v1/responses: OpenAI's fields, and the sampling and job fields that all APIs share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from engine.api.openai.output_format import refuse_other_forms
from engine.api.openai.protocol import GenerationRequest, Int64, ListOf
from engine.api.openai_responses.input_items import Item
from engine.api.openai_responses.items import ReasoningConfig, TextConfig
from engine.api.openai_responses.tools import Tool
from engine.api.prompt.thinking_effort import budget_of_effort, effort_arguments
from engine.api.service.identity import ClientIdentity
from engine.errors import ContextLengthError, RequestError
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams

Id = Annotated[str, Field(min_length=1, max_length=128)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""A client's metadata of a response or conversation, within OpenAI's limits: it is stored and
returned, not read."""

REASONING_SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def _text_or_items(given: object) -> object:
    """Validates by hand, since the errors of a union would mention text only."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise RequestError("input must be a string or a list of items.", "input")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise RequestError(f"input[{index}] must be an item: an object with a type.", f"input[{index}]")
    return given


class ReasoningParam(BaseModel):
    """Reasoning effort. There are no summaries, because the reasoning itself is returned."""

    effort: str | None = None
    summary: str | None = None


class TextParam(BaseModel):
    """The text's format. ``verbosity`` is for models that were trained for it."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationParam(BaseModel):
    """A conversation by its id."""

    id: Id


class ResponsesRequest(GenerationRequest):
    """Body of POST /v1/responses."""

    input: Annotated[str | ListOf[Item] | None, BeforeValidator(_text_or_items)] = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: Id | ConversationParam | None = None
    store: bool | None = None
    background: bool | None = None
    include: ListOf[str] | None = None
    prompt: dict[str, Any] | None = None

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    max_tool_calls: Int64 | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: ListOf[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _check_responses(self) -> Self:
        if self.n not in (None, 1):
            raise RequestError("n must be 1: a response is one reply.", "n")
        if self.prompt is not None:
            raise RequestError("prompt is not supported: this server has no prompt templates.", "prompt")
        if self.previous_response_id is not None and self.conversation is not None:
            raise RequestError(
                "previous_response_id and conversation both name the history: send one.",
                "previous_response_id",
            )
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise RequestError("input is needed: a string, or a list of items that is not empty.", "input")
        self._check_kept()
        return self

    def _check_kept(self) -> None:
        if self.keeps:
            return
        if self.background:
            raise RequestError("background needs store: its response is read from the store.", "background")
        if self.conversation is not None:
            raise RequestError("conversation needs store: it consists of stored responses.", "conversation")

    @property
    def keeps(self) -> bool:
        """Whether the response is stored, so that it can be read and continued."""
        return self.store is not False

    @property
    def conversation_name(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationParam) else named

    @property
    def compared_with(self) -> str | None:
        """The response whose prompt should have been reused, if the client asks about it."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    def echoed_cache_options(self) -> dict[str, Any] | UnsetType:
        options = self.prompt_cache_options
        return UNSET if options is None else options.model_dump(exclude_none=True)

    def includes(self, what: str) -> bool:
        return what in (self.include or ())

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None and not self.includes(LOGPROBS):
            return None
        return self.top_logprobs or 0

    def sampling_params(self, defaults: SamplingParams, num_logprobs: int | None) -> SamplingParams:
        params = super().sampling_params(defaults, num_logprobs)
        wanted = self._structured_output()
        return params if wanted is None else msgspec.structs.replace(params, structured_outputs=wanted)

    def _structured_output(self) -> StructuredOutputsParams | None:
        """The output format of ``text.format``. A schema that is not strict is enforced where possible."""
        form = (self.text or TextParam()).format or {}
        refuse_other_forms("text.format", str(form.get("type", "text")), form, taken=("schema",))
        match form.get("type", "text"):
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True, asked_in="text.format")
            case "json_schema" if isinstance(form.get("schema"), dict):
                lenient = not form.get("strict")
                return StructuredOutputsParams(json=form["schema"], lenient=lenient, asked_in="text.format")
        raise RequestError(
            "text.format must be of type 'text', 'json_object', or 'json_schema' with a schema.",
            "text.format",
        )

    def output_limit(self) -> int | None:
        return self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens

    def identity_after(self, previous_job_id: str | None) -> ClientIdentity:
        """The body's fields that identify the job, which continues that of the previous response."""
        named = self.conversation_name or self.conversation_id
        return replace(
            self.identity(),
            conversation=named,
            previous_job_id=previous_job_id,
            streams=bool(self.stream or self.background),
        )

    def named(self, error: ContextLengthError) -> ContextLengthError:
        """Returns the error with the client's name for the output limit."""
        if error.field == "max_tokens" and self.max_output_tokens is not None:
            return ContextLengthError(str(error), "max_output_tokens")
        return error

    def template_kwargs(self) -> dict[str, Any] | None:
        effort = self.reasoning.effort if self.reasoning else None
        kwargs = effort_arguments(effort, "reasoning.effort")
        return {**kwargs, **(self.chat_template_kwargs or {})} or None

    def thinking_budget(self) -> int | None:
        """The maximum number of reasoning tokens at the requested effort."""
        return budget_of_effort(self.reasoning.effort if self.reasoning else None, self.output_limit())

    def echoed_text(self) -> TextConfig:
        text = self.text or TextParam()
        return TextConfig(format=text.format or {"type": "text"}, verbosity=text.verbosity)

    def echoed_reasoning(self) -> ReasoningConfig:
        return ReasoningConfig(effort=self.reasoning.effort if self.reasoning else None)
