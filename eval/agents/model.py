"""What an agent wants of a language model: a reply, with the calls in it. Knows no transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.messages import TurnReceipt
from eval.load.client import TurnFailedError

Message = dict[str, Any]
"""As OpenAI's chat API has it."""
Schema = dict[str, Any]
"""A function tool, likewise."""
OnText = Callable[[str], None]
"""Is given the text of a reply as it comes, piece by piece."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model wrote it."""

    call_id: str
    name: str
    arguments: str
    """JSON text, unless the model wrote something else."""

    def item(self) -> Message:
        """As a part of the message that made it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """One reply, and what the server says that it took."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    ttft_s: float
    latency_s: float
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt; None where the server does not say."""
    output_tokens: int = 0
    receipt: TurnReceipt | None = None
    """What the server did for the job's KV, if it says that."""

    def message(self) -> Message:
        """The reply as a part of the conversation that goes on from it. Thoughts are not repeated."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.item() for call in self.calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How replies are drawn; what is None is left to the server."""

    temperature: float | None = 0.0
    seed: int | None = None
    max_tokens: int | None = None

    def fields(self) -> dict[str, float | int]:
        """Of a request's body."""
        known = {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}
        return {name: value for name, value in known.items() if value is not None}


class ChatModel(Protocol):
    """A model behind some transport."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Schema], job_id: str | None, on_text: OnText
    ) -> ModelReply:
        """The model's next message. ``job_id`` None: whose turn it is the server may find out by itself.

        Raises TurnFailedError if this request went wrong, ServerGoneError if there is no server any more.
        """
        ...


@dataclass(slots=True)
class _CallParts:
    """A call that comes in pieces."""

    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ReplyBuilder:
    """Puts the pieces of a streamed reply together. Its clock starts when it is made."""

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
        """A chunk of the reply is here."""
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started

    def add_text(self, text: str) -> None:
        self._text.append(text)
        self._on_text(text)

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def add_call(self, index: int, call_id: str | None, name: str | None, arguments: str | None) -> None:
        """A piece of the reply's call number ``index``."""
        parts = self._calls.setdefault(index, _CallParts())
        parts.call_id += call_id or ""
        parts.name += name or ""
        parts.arguments.append(arguments or "")

    def reply(self) -> ModelReply:
        """What it came to; TurnFailedError if nothing came."""
        if self._ttft_s is None:
            raise TurnFailedError("the answer held no choices")
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
