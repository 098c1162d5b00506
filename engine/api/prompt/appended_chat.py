"""Finds the text that a chat template writes after a reply for the messages that follow it.

If a template only appends, a turn's prompt is the previous turn's prompt, the tokens of the reply, and this
text: the history is neither rendered nor tokenized again. To check this, a short stand-in for the history is
rendered with the real reply and the real messages after it. So a template that strips earlier reasoning, or
moves tools or a system message, is detected in the turn where it does.

This module does not know tokens or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api.prompt.chat_messages import Message
from engine.errors import RequestError

Render = Callable[[list[Message], bool], str]
"""Renders messages, with or without the beginning of the next reply."""

_REASONING = ("reasoning", "reasoning_content", "thinking")
_CALL_ID = "call00001"
STAND_IN_TOOL: Message = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
"""Replaces all tools of a chat: templates write them where a chat has any."""


@dataclass(frozen=True, slots=True)
class HistoryShape:
    """The properties of the messages before a reply that templates depend on."""

    has_system: bool
    has_tools: bool
    """Whether there are tools, or results of tools."""
    has_reasoning: bool

    def reply(self, message: Message, reasoning: str) -> Message:
        """Returns the message, with reasoning if replies have any."""
        return {**message, **dict.fromkeys(_REASONING, reasoning)} if self.has_reasoning else message


def appended_text(
    reply: Message, following: Sequence[Message], end_of_reply: str, shape: HistoryShape, render: Render
) -> str | None:
    """Returns the text after ``end_of_reply``, the special token that ended the reply; None if the template
    does not only append, or may not."""
    if (
        reply["role"] != "assistant"
        or not following
        or not all(_may_follow(reply, each) for each in following)
    ):
        return None
    history = _stand_in(shape)
    try:
        asked = render(history, True)
        answered = render([*history, reply], False)
        followed = render([*history, reply, *following], True)
    except RequestError:
        return None
    if not (answered.startswith(asked) and followed.startswith(answered)):
        return None
    body, end, behind = answered[len(asked) :].rpartition(end_of_reply)
    if not end or not all(part in body for part in _parts_of(reply)):
        return None
    return behind + followed[len(answered) :]


def _may_follow(reply: Message, message: Message) -> bool:
    """Whether the rendered message depends on no message before the reply: some templates look up the call of
    a result."""
    if message["role"] == "tool":
        return message.get("tool_call_id") in [call.get("id") for call in reply.get("tool_calls", ())]
    return bool(message["role"] == "user")


def _stand_in(shape: HistoryShape) -> list[Message]:
    """Returns a short history with a message of each kind that the real one may contain."""
    history: list[Message] = [{"role": "system", "content": "Be brief."}] if shape.has_system else []
    history += [
        {"role": "user", "content": "One?"},
        shape.reply({"role": "assistant", "content": "Two."}, "It asks."),
        {"role": "user", "content": "Three?"},
    ]
    if shape.has_tools:
        call = {"type": "function", "id": _CALL_ID, "function": {"name": "look", "arguments": {}}}
        history += [
            shape.reply({"role": "assistant", "content": "Four.", "tool_calls": [call]}, "It needs it."),
            {"role": "tool", "content": "Five.", "tool_call_id": _CALL_ID},
        ]
    return history


def _parts_of(reply: Message) -> list[str]:
    """Texts of the reply that any template which keeps the reply must write."""
    parts = [str(reply["content"]), str(reply.get("reasoning") or "")]
    parts += [call["function"]["name"] for call in reply.get("tool_calls", ())]
    return [part.strip() for part in parts]
