"""Bodies of the Messages API: Anthropic's fields, with V1's and this project's as extras. Unknown fields are
ignored.

``service_tier``, ``container``, ``context_management``, ``inference_geo`` and ``speed`` are ignored too,
since they concern Anthropic's servers. ``cache_control`` only affects how tokens are counted, and the minimum
time for which a turn's KV is kept: every prefix is cached here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.api.config import DefaultThinking
from engine.api.errors import ThreadsUnsupportedError
from engine.api.field_names import one_of
from engine.api.openai.protocol import Int64, ListOf, TokenId, refuse_other_constraints
from engine.api.prompt.thinking_effort import budget_of_effort, effort_arguments, thinking_arguments
from engine.api.prompt_cache.lifetime import lifetime_s
from engine.api.service.identity import ClientIdentity
from engine.api.unsupported import refuse_unsupported
from engine.errors import RequestError
from engine.records.sampling_params import MAX_STOP_STRINGS, SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams

_OTHER_DIALECTS = {
    "stop": "; use stop_sequences",
    "max_completion_tokens": "; use max_tokens",
    "max_output_tokens": "; use max_tokens",
    "response_format": "; use output_config.format",
    "structured_outputs": "; use output_config.format",
    "reasoning_effort": "; use output_config.effort",
    "reasoning": "; use thinking and output_config.effort",
    "enable_thinking": "; use thinking",
    "parallel_tool_calls": "; use tool_choice.disable_parallel_tool_use",
    "functions": "; use tools",
    "instructions": "; use system",
    **dict.fromkeys(("n", "best_of", "logprobs", "top_logprobs", "logit_bias", "bad_words"), ""),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "include_stop_str_in_output"), ""),
}
"""Other APIs' fields that change the result, with their names in this API."""

StopSequence = Annotated[str, Field(min_length=1)]


class Thinking(BaseModel):
    """Whether the model reasons before it answers, and whether the client wants the reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int64 | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(BaseModel):
    """Which tool to call; ``any`` means at least one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BaseModel):
    """The format of the response's text."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """Effort and output format."""

    effort: str | None = None
    format: OutputFormat | None = None


class DiagnosticsParam(BaseModel):
    """The message whose prompt should have been reused; None opts in before there is one."""

    previous_message_id: Annotated[str, Field(max_length=128)] | None = None


class Metadata(BaseModel):
    """Metadata of the request; agents put their session into ``user_id``."""

    user_id: str | None = None


class PromptRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens: everything that determines the prompt."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)]
    system: Annotated[
        str | ListOf[dict[str, Any]] | None, one_of("system", "a string or a list of text blocks")
    ] = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        """Refuses a thread: later turns would send only new messages, so the prompt would lack the rest."""
        if self.thread is not None:
            raise ThreadsUnsupportedError
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in _OTHER_DIALECTS and value and value != 1:
                raise RequestError(f"{name} is not a field of Messages{_OTHER_DIALECTS[name]}.", name)
        refuse_unsupported(extra)
        return self

    def template_kwargs(self, default_thinking: DefaultThinking) -> dict[str, Any]:
        """Reasoning and effort as template arguments; those in ``chat_template_kwargs`` take precedence.
        ``default_thinking``: whether the model reasons if the request does not specify it."""
        effort = self.output_config.effort if self.output_config is not None else None
        kwargs = effort_arguments(effort, "output_config.effort")
        if self.thinking is not None:
            kwargs |= thinking_arguments(thinks=self.thinking.type != "disabled")
        elif default_thinking != "template":
            kwargs |= thinking_arguments(thinks=default_thinking == "on")
        return {**kwargs, **(self.chat_template_kwargs or {})}

    def thinking_budget(self) -> int | None:
        """Always None: a prompt that is only counted has no budget."""
        return None

    def parallel_tool_calls(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    def last_breakpoint(self) -> dict[str, Any] | None:
        """The last ``cache_control`` of the prompt; None without any."""
        if self.cache_control:
            return self.cache_control
        system = self.system if isinstance(self.system, list) else []
        contents = [message.get("content") for message in self.messages]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        for item in reversed((*(self.tools or []), *system, *blocks)):
            control = item.get("cache_control") if isinstance(item, dict) else None
            if control:
                return control if isinstance(control, dict) else {}
        return None

    def asked_lifetime_s(self) -> float | None:
        """How long the client asks to cache the prompt; None if unspecified or unknown: a client cannot
        remove what its history holds."""
        ttl = (self.last_breakpoint() or {}).get("ttl")
        return lifetime_s(ttl) if isinstance(ttl, str) else None


class MessagesRequest(PromptRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, lt=2**63)]
    """0 only prefills the prompt, and so caches it."""
    stream: bool | None = None
    stop_sequences: Annotated[ListOf[StopSequence], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    metadata: Metadata | None = None
    diagnostics: DiagnosticsParam | None = None

    seed: Int64 | None = None
    min_p: float | None = None
    min_tokens: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[TokenId] | None = None
    replay_token_ids: ListOf[TokenId] | None = None
    return_token_ids: bool | None = None

    priority: Int64 | None = None
    deadline_s: Any = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    job_id: Any = None
    parent_job_id: Any = None
    session_id: Any = None
    is_last_step: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _refuse_other_constraints(self) -> Self:
        refuse_other_constraints(self.model_extra or {})
        return self

    def thinking_budget(self) -> int | None:
        """The maximum number of reasoning tokens: the request's own budget, or a share by its effort."""
        thinking = self.thinking
        output = self.output_config
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
            return max(0, thinking.budget_tokens)
        return budget_of_effort(output.effort if output is not None else None, self.max_tokens)

    def identity(self) -> ClientIdentity:
        """The body's fields that identify the job, and its priority and cache salt."""
        return ClientIdentity(
            job_id=self.job_id,
            parent_job_id=self.parent_job_id,
            is_last_step=self.is_last_step,
            xargs=self.vllm_xargs,
            session_id=self.session_id,
            metadata_user_id=self.metadata.user_id if self.metadata is not None else None,
            tenant=self.user,
            priority=self.priority,
            deadline_s=self.deadline_s,
            cache_salt=self.cache_salt,
            asked_ttl_s=self.asked_lifetime_s(),
            prewarms=not self.max_tokens,
            streams=bool(self.stream),
        )

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The model's ``defaults``, overridden by the request's values."""
        set_here = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        changes = {name: value for name, value in set_here.items() if value is not None}
        return msgspec.structs.replace(
            defaults,
            **changes,
            stop=self.stop_sequences or [],
            max_tokens=max(1, self.max_tokens),
            structured_outputs=self._wanted_output(),
        )

    def _wanted_output(self) -> StructuredOutputsParams | None:
        """The requested output format; ``output_format`` is the field's older name."""
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.json_schema
            field = "output_config.format.schema"
        elif self.output_format is not None:
            schema = self.output_format.json_schema
            field = "output_format.schema"
        else:
            return None
        return StructuredOutputsParams(json=schema, asked_in=field)


_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in MessagesRequest.model_fields and name != "max_tokens"
)
