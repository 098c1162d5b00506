"""A client's request for one turn: a chat, and the requirements on the reply.

It is independent of the API that the client uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.api.prompt.prompts import ChatPrompt
from engine.records.messages import NO_CONTEXT, RequestContext
from engine.records.sampling_params import SamplingParams
from engine.tokenization.prompt_encoder import ContinuedTokens

if TYPE_CHECKING:
    from engine.api.prompt_cache.fingerprint import PromptPrint


@dataclass(frozen=True, slots=True)
class FreeInput:
    """A tool's only argument, if it is free text."""

    parameter: str
    grammar: str
    """The text's grammar, in Lark."""
    asked_in: str
    """The request field that holds the grammar, for error messages."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that the reply must call."""

    name: str
    free_input: FreeInput | None = None
    """Set if the tool's only argument is text that follows a grammar: the reply then consists of that
    text."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """A prompt that appends to an earlier turn, whose messages are not read again."""

    token_ids: ContinuedTokens
    num_replies: int
    num_results: int
    """Numbers of replies and of tool results before the last reply."""
    fingerprint: PromptPrint | None
    """The earlier prompt's fingerprint, if it was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation(ChatPrompt):
    """A client's request for one turn, independent of the API: a chat, and the requirements on the reply."""

    request_id: str
    params: SamplingParams
    """``max_tokens`` None means the model's own default, else the rest of the context."""
    tool_choice: ToolChoice = "auto"
    free_inputs: dict[str, FreeInput] = field(default_factory=dict)
    """Tools whose only argument is text that follows a grammar, by name."""
    parallel_tool_calls: bool = True
    context: RequestContext = NO_CONTEXT
    fits_context: bool = False
    """Whether a ``max_tokens`` beyond the rest of the context is clamped to it; if not, it is an error."""
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens, requested as effort or as Anthropic's budget: enforced if the
    model's format allows it. ``params.thinking_token_budget``, which takes precedence, is refused
    otherwise."""
    include_reasoning: bool = True
    """Whether the response includes the reasoning; it is parsed as such in any case."""
    left_out: list[str] = field(default_factory=list)
    """Parts of the request that were left out, because a text model cannot be shown them."""

    continued: ContinuedPrompt | None = None
    """Set if the prompt is known: ``messages`` are then only the last reply and what follows it."""

    @property
    def has_media(self) -> bool:
        """Whether its messages contain any pictures or clips."""
        return self.media is not None and self.media.has_any

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def holds_calls_back(self) -> bool:
        """Whether the model is shown tools but may call none."""
        return bool(self.tools) and self.tool_choice == "none"

    @property
    def max_calls(self) -> int | None:
        """Maximum number of tool calls of one answer; None means no limit."""
        return None if self.parallel_tool_calls else 1
