"""``truncation: auto``: leaves out a part of a conversation that is too long."""

from __future__ import annotations

from engine.api.prompt.chat_messages import Message

SHARE = 4
"""Each attempt removes one in this many of the removable messages, because it renders a prompt."""


def without_oldest(messages: list[Message]) -> list[Message] | None:
    """Returns the conversation without its oldest part; None if nothing can be removed.

    Leading system messages and the last message stay. No tool result is left without its call.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    enough = first + max(1, (len(messages) - first) // SHARE)
    for index in range(enough, len(messages)):
        if messages[index]["role"] != "tool":
            return messages[:first] + messages[index:]
    return None
