"""Converts conversations that a chat template refuses to variants that it may accept.

A client cannot change its history, so a message that makes the template raise would end its job. The variants
are tried in turn and the first that renders is used. A history that needed a variant once needs it from then
on, so each turn's prompt still begins with the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.api.prompt.chat_messages import Message
from engine.errors import RequestError


def in_some_shape(messages: list[Message], render: Callable[[list[Message]], str]) -> str:
    """Renders the first variant that the template accepts; raises the first error if it accepts none."""
    failure: RequestError | None = None
    for shape in _shapes(messages):
        try:
            return render(shape)
        except RequestError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _shapes(messages: list[Message]) -> Iterator[list[Message]]:
    """Yields the conversation unchanged; with adjacent messages of one role merged, for templates that need
    alternating roles; with the system message in the user's first message, for templates without a system
    role."""
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
