"""Request bodies: OpenAI's fields, V1's additional sampling fields, and this project's fields for
jobs.

Unknown fields are ignored. Unsupported fields that would change the result are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar, cast

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.api.field_names import one_of
from engine.api.openai.allowed_tools import allowed_names, check_tool_choice
from engine.api.openai.chat_tools import check_tools
from engine.api.openai.output_format import ResponseFormat, StructuredOutputs, wanted_output
from engine.api.openai.prompt_cache import PromptCacheOptions, PromptCacheRetention, asked_ttl_s
from engine.api.openai.repetition import RepetitionDetectionFields
from engine.api.prompt.thinking_effort import budget_of_effort, effort_arguments, thinking_arguments
from engine.api.service.identity import ClientIdentity
from engine.api.service.tiers import ServiceTier, priority_of
from engine.api.unsupported import refuse_unsupported
from engine.errors import RequestError
from engine.records.sampling_params import MAX_N, SamplingParams

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation stops at the first error: reporting a million errors would take
gigabytes."""
MAX_BIASED_TOKENS = 16384
MAX_SEQUENCES = 4096
"""Maximum number of sequences of one request: prompts times ``n``."""


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


StringList = Annotated[ListOf[str], BeforeValidator(_one_or_many)]


def _not_too_many(biases: object) -> object:
    if isinstance(biases, dict) and len(biases) > MAX_BIASED_TOKENS:
        raise RequestError(f"logit_bias must hold at most {MAX_BIASED_TOKENS} tokens.", "logit_bias")
    return biases


_OTHER_CONSTRAINTS = {
    "grammar": "grammar is not a field here; use structured_outputs.grammar.",
    "grammar_triggers": "grammar_triggers is not supported; use structured_outputs.grammar.",
    "regex": "regex is not a field here; use structured_outputs.regex.",
    "ebnf": "ebnf is not a field here; use structured_outputs.grammar.",
    "choice": "choice is not a field here; use structured_outputs.choice.",
    "json_schema": "json_schema is not a field here; use response_format.",
    "response_schema": "response_schema is not a field here; use response_format.",
    "format": "format is not a field here; use response_format.",
    "guided_decoding": "guided_decoding is not a field here; use structured_outputs.",
    "structural_tag": "structural_tag is not a field here; use structured_outputs.structural_tag.",
}
"""Other servers' fields for an output format. Ignoring one would return another format."""

_UNSUPPORTED = {
    **_OTHER_CONSTRAINTS,
    "guided_json": "guided_json is no longer a field; use structured_outputs.json.",
    "guided_regex": "guided_regex is no longer a field; use structured_outputs.regex.",
    "guided_choice": "guided_choice is no longer a field; use structured_outputs.choice.",
    "guided_grammar": "guided_grammar is no longer a field; use structured_outputs.grammar.",
    "guided_decoding_backend": "guided_decoding_backend is no longer a field; there is one backend.",
    "guided_whitespace_pattern": (
        "guided_whitespace_pattern is no longer a field; use structured_outputs.whitespace_pattern."
    ),
    "functions": "functions is not supported; use tools.",
    "use_beam_search": "use_beam_search is not supported over HTTP; use LLM.beam_search.",
    "best_of": "best_of is not supported; use n.",
    "logprob_token_ids": "logprob_token_ids is not supported.",
    "truncate_prompt_tokens": "truncate_prompt_tokens is not supported; send a prompt that fits.",
}


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """Common fields of chat and completion requests."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Int64 | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: StringList | None = None
    logit_bias: Annotated[dict[TokenId, float], BeforeValidator(_not_too_many)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: ListOf[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: StringList | None = None
    allowed_token_ids: ListOf[TokenId] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    replay_token_ids: ListOf[TokenId] | None = None
    prompt_logprobs: Int64 | None = None
    repetition_detection: RepetitionDetectionFields | None = None
    thinking_token_budget: Int64 | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    priority: Int64 | None = None
    service_tier: ServiceTier | None = None
    deadline_s: Any = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    routed_experts_prompt_start: Int64 | None = None

    job_id: Any = None
    parent_job_id: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    conversation: Any = None
    conversation_id: Any = None
    metadata: dict[str, Any] | None = None
    is_last_step: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value and name in _UNSUPPORTED and not _changes_nothing(name, value):
                raise RequestError(_UNSUPPORTED[name], name)
        refuse_unsupported(self.model_extra or {})
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")
        if self.prewarms and (self.n or 1) != 1:
            raise RequestError("n must be 1 where prompt_cache_options.prewarm is true.", "n")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream, which is off.", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def prewarms(self) -> bool:
        """Whether the prompt is only cached and nothing is generated."""
        return self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)

    def identity(self) -> ClientIdentity:
        """The body's fields that identify the job, and its priority and cache salt."""
        return ClientIdentity(
            job_id=self.job_id,
            parent_job_id=self.parent_job_id,
            is_last_step=self.is_last_step,
            xargs=self.vllm_xargs,
            session_id=self.session_id,
            metadata_user_id=(self.metadata or {}).get("user_id"),
            prompt_cache_key=self.prompt_cache_key,
            conversation=self.conversation or self.conversation_id,
            tenant=self.user,
            priority=priority_of(self.service_tier, self.priority),
            deadline_s=self.deadline_s,
            cache_salt=self.cache_salt,
            asked_ttl_s=asked_ttl_s(self.prompt_cache_options, self.prompt_cache_retention),
            prewarms=self.prewarms,
            streams=bool(self.stream),
            kv_transfer_params=self.kv_transfer_params,
        )

    def sampling_params(self, defaults: SamplingParams, num_logprobs: int | None) -> SamplingParams:
        """The model's ``defaults``, overridden by the request's values."""
        set_here = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        changes = {name: value for name, value in set_here.items() if value is not None}
        if self.prewarms:
            changes["min_tokens"] = 0
        detection = self.repetition_detection
        return msgspec.structs.replace(
            defaults,
            **changes,
            max_tokens=1 if self.prewarms else self.output_limit(),
            logprobs=num_logprobs,
            structured_outputs=wanted_output(self.response_format, self.structured_outputs),
            repetition_detection=None if detection is None else detection.params(),
        )

    def output_limit(self) -> int | None:
        """Maximum number of tokens to generate; None means the rest of the context."""
        return self.max_tokens


_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationRequest.model_fields
    and name not in ("max_tokens", "logprobs", "structured_outputs", "repetition_detection")
)


def refuse_other_constraints(fields: Mapping[str, object]) -> None:
    """Raises RequestError for another server's field that sets an output format."""
    for name, value in fields.items():
        if value and name in _OTHER_CONSTRAINTS:
            raise RequestError(_OTHER_CONSTRAINTS[name], name)


def _changes_nothing(name: str, value: object) -> bool:
    """Whether the value is neutral, such as ``best_of: 1``, which is the default behavior."""
    return name == "best_of" and value == 1


class Reasoning(BaseModel):
    """Reasoning effort, as routers of many models send it."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingSwitch(BaseModel):
    """Turns reasoning on or off, as some models' own servers take it."""

    type: str


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, one_of("tool_choice", "'none', 'auto', 'required' or a function")
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: ThinkingSwitch | bool | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool = True
    documents: ListOf[dict[str, Any]] | None = None
    """Documents for templates that include them in the prompt."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs, which is off.", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise RequestError(
                    "continue_final_message and add_generation_prompt cannot both be on.",
                    "continue_final_message",
                )
            self.add_generation_prompt = False
        check_tools(self.tools or [])
        check_tool_choice(self.tool_choice, self.tools or [])
        self._check_thinking()
        return self

    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _check_thinking(self) -> None:
        if self.reasoning is not None and self.reasoning.exclude:
            self.include_reasoning = False
        self.template_kwargs()
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens must be off: the chat template adds them.", "add_special_tokens"
            )

    def template_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the template besides the messages; those in ``chat_template_kwargs`` take
        precedence."""
        asked = self.reasoning or Reasoning()
        kwargs = effort_arguments(asked.effort, "reasoning.effort")
        kwargs |= effort_arguments(self.reasoning_effort, "reasoning_effort")
        for thinks in (asked.enabled, self._thinks(), self.enable_thinking):
            if thinks is not None:
                kwargs |= thinking_arguments(thinks=thinks)
        if self.documents:
            kwargs["documents"] = self.documents
        return {**kwargs, **(self.chat_template_kwargs or {})} or None

    def thinking_budget(self) -> int | None:
        """The maximum number of reasoning tokens at the requested effort."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        return budget_of_effort(effort, self.output_limit())

    def _thinks(self) -> bool | None:
        if isinstance(self.thinking, ThinkingSwitch):
            return self.thinking.type != "disabled"
        return self.thinking

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        names = allowed_names(self.tool_choice)
        if names is None:
            return self.tools
        return [tool for tool in self.tools or [] if tool["function"]["name"] in names]

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_names(self) -> dict[str, str]:
        """The client's names of the engine's fields."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        return (
            names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}
        )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | ListOf[TokenId] | ListOf[str] | ListOf[ListOf[TokenId]],
        one_of("prompt", "a string, a list of token ids, or a list of strings or of lists of token ids"),
    ]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Int64 | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.suffix:
            raise RequestError("suffix is not supported: the model completes to the right only.", "suffix")
        if self.echo and self.logprobs is not None and self.stream:
            raise RequestError("echo with logprobs cannot be streamed.", "echo")
        if len(self.prompts()) * min(self.n or 1, MAX_N) > MAX_SEQUENCES:
            raise RequestError(f"prompt times n must be at most {MAX_SEQUENCES} sequences.", "prompt")
        return self

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt is returned with its tokens' log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt must not be empty.", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return cast(list[str | list[int]], prompt)


_OF_SAMPLING = frozenset(
    (*_SAMPLING_FIELDS, "max_tokens", "logprobs", "structured_outputs", "repetition_detection")
)


class GenerateRequest(BaseModel):
    """Body of POST /inference/v1/generate, V1's. The fields that identify a job are those of a completion."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    token_ids: Annotated[ListOf[TokenId], Field(min_length=1)]
    sampling_params: dict[str, Any]
    stream: bool | None = None
    features: Any = None

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.features is not None:
            raise RequestError(
                "features must be null: pictures and audio are read by /v1/chat/completions only.", "features"
            )
        return self

    def completion(self) -> CompletionRequest:
        """The completion that this asks for; ValidationError if a parameter is of a wrong type."""
        whole = {"model": self.model, "stream": self.stream, **(self.model_extra or {})}
        asked = {name: value for name, value in whole.items() if name not in _OF_SAMPLING}
        known = CompletionRequest.model_fields.keys() - _OF_SAMPLING
        asked |= {name: value for name, value in self.sampling_params.items() if name not in known}
        return CompletionRequest.model_validate({**asked, "prompt": self.token_ids, "echo": None})


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Give either prompt or messages.", "prompt")
        check_tools(self.tools or [])
        return self


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: ListOf[Annotated[int, Field(ge=0, lt=2**31)]]
