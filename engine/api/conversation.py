"""What a client asks for, whichever API it asked through: a chat, and what is wanted of the reply.

It must not know how any dialect spells it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.api.prompts import ChatPrompt
from engine.messages import NO_CONTEXT, RequestContext
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FreeInput:
    """The text that a tool takes as its one argument."""

    parameter: str
    grammar: str
    """In Lark."""
    asked_in: str
    """The field that has it, for errors."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that the reply must call."""

    name: str
    free_input: FreeInput | None = None
    """Set if its one argument is a text that follows a grammar: the reply is that text alone."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation(ChatPrompt):
    """What a client asks for, in no dialect: a chat, and what is wanted of the reply."""

    request_id: str
    params: SamplingParams
    """``max_tokens`` None is the model's own limit, else what is left of the context."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    context: RequestContext = NO_CONTEXT
    fits_context: bool = False
    """Whether ``max_tokens`` beyond the room that the prompt leaves means that room; else it is an error."""
    include_reasoning: bool = True
    """Whether what the model thinks is given out; it is read as such in any case."""
    left_out: list[str] = field(default_factory=list)
    """What of the request is not in it, as there is nothing that a text model could be shown."""

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def holds_calls_back(self) -> bool:
        """Whether the model sees tools of which it may call none."""
        return bool(self.tools) and self.tool_choice == "none"

    @property
    def max_calls(self) -> int | None:
        """Most tool calls of one answer; None is no limit."""
        return None if self.parallel_tool_calls else 1
