"""Parses one answer of a turn: converts its text to deltas and a reply, and its end to a finish reason.

This module is independent of the API that the client uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.frontend.request_output import CompletionOutput
from engine.records.messages import ToolCall
from engine.tool_parsers import (
    ParsedReply,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
    ToolCallDelta,
    read_fenced_command,
)
from engine.tool_parsers.sound_calls import SoundCalls


@dataclass(slots=True)
class AnswerOutput:
    """The new part of one answer, and the reply so far."""

    index: int
    deltas: list[ReplyDelta]
    reply: ParsedReply
    raw: CompletionOutput
    """The new tokens and their logprobs."""
    finish_reason: str | None = None
    """``stop`` | ``length`` | ``tool_calls``; None while the answer continues."""
    is_cut_in_call: bool = False
    """Whether the answer ended in the middle of its last tool call: that call must not be run."""

    @property
    def stop_reason(self) -> int | str | None:
        return self.raw.stop_reason


@dataclass(slots=True)
class AnswerReader:
    """Reads one of the ``n`` answers."""

    _parser: ReplyParser
    _max_calls: int | None
    _include_reasoning: bool
    named: bool
    """Whether the request named the one tool to call: its call then ends with ``stop``, as in V1."""
    reply: ParsedReply = field(default_factory=ParsedReply)
    num_tokens: int = 0
    _is_cut_in_call: bool = False
    """Whether the last call's arguments are incomplete; such a call must not be run."""

    def read(self, answer: CompletionOutput) -> AnswerOutput:
        self.num_tokens += len(answer.token_ids)
        deltas = self._take(self._parser.feed(answer.text))
        if answer.finished:
            deltas += self._take(self._end_parser(answer))
            self._is_cut_in_call = bool(self.reply.calls) and not _is_json(self.reply.calls[-1].arguments)
        if not self._include_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        finish_reason = self._finish_reason(answer)
        return AnswerOutput(
            answer.index, deltas, self.reply, answer, finish_reason, is_cut_in_call=self._is_cut_in_call
        )

    def _take(self, read: list[ReplyDelta]) -> list[ReplyDelta]:
        """Adds the deltas within the client's limit to the reply, and returns them."""
        deltas = [delta for delta in read if not self._beyond_limit(delta)]
        self.reply.add(deltas)
        return deltas

    def _end_parser(self, answer: CompletionOutput) -> list[ReplyDelta]:
        if isinstance(self._parser, SoundCalls):
            by_itself = answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
            return self._parser.finish(is_whole=by_itself)
        return self._parser.finish()

    def _beyond_limit(self, delta: ReplyDelta) -> bool:
        """Whether the delta belongs to a call beyond the maximum that the client allows."""
        return (
            self._max_calls is not None
            and isinstance(delta, ToolCallDelta)
            and delta.index >= self._max_calls
        )

    def _finish_reason(self, answer: CompletionOutput) -> str | None:
        """The finish reason. It reports a reply that was cut off by its length, or in a call, even after a
        complete call.

        If a model ends its turn in the middle of a call, that counts as cut off too, since its reply is
        unfinished.
        """
        if answer.finish_reason != "stop":
            return answer.finish_reason
        if self._is_cut_in_call:
            return "stop" if isinstance(answer.stop_reason, str) else "length"
        return "tool_calls" if self.reply.calls and not self.named else "stop"

    def announced_calls(self) -> list[ToolCall]:
        """The tool calls that run next, or the command of a text agent."""
        if self.reply.calls:
            return self.reply.tool_calls[:-1] if self._is_cut_in_call else self.reply.tool_calls
        command = read_fenced_command(self.reply.content)
        return [command] if command is not None else []


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
