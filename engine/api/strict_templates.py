"""Conversations that a chat template refuses, in shapes that it may take.

A client cannot take its history back: what a template raises at would end its job for ever. These are tried
in turn, and the first that can be rendered is served. A history that has once needed one needs it from then
on, so each turn's prompt still begins with the last one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.api.chat_messages import Message
from engine.errors import RequestError


def in_some_shape(messages: list[Message], render: Callable[[list[Message]], str]) -> str:
    """The conversation in the first shape that can be rendered; the first error if none can."""
    failure: RequestError | None = None
    for shape in _shapes(messages):
        try:
            return render(shape)
        except RequestError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _shapes(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation as it is; its neighbors of one role joined, for templates that want roles to
    alternate; and with the system's words in the user's first message, for those that know no system."""
    yield messages
    joined = _joined(messages)
    if len(joined) < len(messages):
        yield joined
    if len(joined) > 1 and joined[0]["role"] == "system" and joined[1]["role"] == "user":
        yield [_as_one(joined[0], joined[1], "user"), *joined[2:]]


def _joined(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and _may_join(joined[-1], message):
            joined[-1] = _as_one(joined[-1], message, message["role"])
        else:
            joined.append(message)
    return joined


def _may_join(one: Message, other: Message) -> bool:
    if one["role"] != other["role"] or one["role"] not in ("user", "assistant"):
        return False
    return not (one.get("tool_calls") or other.get("tool_calls") or other.get("reasoning"))


def _as_one(one: Message, other: Message, role: str) -> Message:
    content = "\n\n".join(filter(None, (one["content"], other["content"])))
    return {**one, "role": role, "content": content}
