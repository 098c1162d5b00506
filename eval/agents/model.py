"""An agent's interface to a language model: a response with its tool calls. Knows no transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.records.messages import TurnReceipt
from eval.load.client import TurnFailedError

Message = dict[str, Any]
"""A message of OpenAI's chat API."""
Schema = dict[str, Any]
"""A function tool of OpenAI's chat API."""
OnText = Callable[[str], None]
"""Called with each piece of a response's text as it arrives."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model wrote it."""

    call_id: str
    name: str
    arguments: str
    """JSON text, unless the model wrote something else."""

    def item(self) -> Message:
        """The call as part of an assistant message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """One response, with its usage and timing."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    ttft_s: float
    latency_s: float
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Cached tokens of the prompt; None where the server does not report them."""
    output_tokens: int = 0
    receipt: TurnReceipt | None = None
    """The server's receipt of what it did for the job's KV, if it sends one."""

    def message(self) -> Message:
        """Returns the response as a message of the conversation, without its reasoning."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.item() for call in self.calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options; None uses the server's default."""

    temperature: float | None = 0.0
    seed: int | None = None
    max_tokens: int | None = None

    def fields(self) -> dict[str, float | int]:
        """The fields of a request body."""
        known = {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}
        return {name: value for name, value in known.items() if value is not None}


class ChatModel(Protocol):
    """A model that is called over some transport."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Schema], job_id: str | None, on_text: OnText
    ) -> ModelReply:
        """Returns the model's next message. ``job_id`` None: the server infers the job.

        Raises TurnFailedError if this request failed, ServerGoneError if the server is gone.
        """
        ...


@dataclass(slots=True)
class _CallParts:
    """A tool call that arrives in pieces."""

    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ReplyBuilder:
    """Assembles a streamed response. Its clock starts when it is created."""

    def __init__(self, on_text: OnText) -> None:
        self._on_text = on_text
        self._started = time.perf_counter()
        self._ttft_s: float | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _CallParts] = {}
        self.finish_reason: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None
        self.output_tokens = 0
        self.receipt: TurnReceipt | None = None

    def begin(self) -> None:
        """Notes that a chunk of the response has arrived."""
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started

    def add_text(self, text: str) -> None:
        self._text.append(text)
        self._on_text(text)

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def add_call(self, index: int, call_id: str | None, name: str | None, arguments: str | None) -> None:
        """Adds a piece of call number ``index``."""
        parts = self._calls.setdefault(index, _CallParts())
        parts.call_id += call_id or ""
        parts.name += name or ""
        parts.arguments.append(arguments or "")

    def reply(self) -> ModelReply:
        """Returns the assembled response; raises TurnFailedError if there is none."""
        if self._ttft_s is None:
            raise TurnFailedError("the response has no choices")
        return ModelReply(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(
                Call(parts.call_id, parts.name, "".join(parts.arguments))
                for _, parts in sorted(self._calls.items())
            ),
            finish_reason=self.finish_reason,
            ttft_s=self._ttft_s,
            latency_s=time.perf_counter() - self._started,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            receipt=self.receipt,
        )
