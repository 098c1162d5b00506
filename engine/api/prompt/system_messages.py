"""Moves system messages to where chat templates accept them: one, at the front. Many templates raise on
others.

Those at the front are joined. One in the middle becomes a reminder in the user's (or tool's) message before
it: moving it to the front would change the whole prompt, and so lose its cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api.prompt.chat_messages import Message

BETWEEN_LEADING = "\n\n"


def reminder_of(text: str) -> str:
    """The text of a system message as a part of another message."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def with_one_system(messages: list[Message]) -> list[Message]:
    """Returns the conversation with at most one system message, as its first. Contents are strings."""
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    return _Placing().placed(messages)


class _Placing:
    def __init__(self) -> None:
        self._placed: list[Message] = []
        self._reminders: list[str] = []
        """System messages between a call and its results, kept until the results arrive."""
        self._is_reminder = False
        """Whether the last message contains only reminders; a user message after it is merged into it."""

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            if message["role"] == "system":
                self._add_system(message)
            else:
                self._add(message)
        self._give_reminders()
        return self._placed

    def _add_system(self, message: Message) -> None:
        text = message["content"]
        last = self._placed[-1] if self._placed else None
        if last is None:
            self._placed.append(message)
        elif not text:
            return
        elif last["role"] == "system":
            self._append(BETWEEN_LEADING, text)
        elif last.get("tool_calls"):
            self._reminders.append(reminder_of(text))
        else:
            self._remind(reminder_of(text))

    def _add(self, message: Message) -> None:
        role = message["role"]
        if role != "tool":
            self._give_reminders()
        if role == "user" and self._is_reminder:
            reminders = self._placed.pop()["content"]
            message = {**message, "content": f"{reminders}\n{message['content']}"}
        self._placed.append(message)
        self._is_reminder = False
        if role == "tool":
            self._give_reminders()

    def _give_reminders(self) -> None:
        for reminder in self._reminders:
            self._remind(reminder)
        self._reminders.clear()

    def _remind(self, reminder: str) -> None:
        if self._placed[-1]["role"] in ("user", "tool"):
            self._append("\n", reminder)
        else:
            self._placed.append({"role": "user", "content": reminder})
            self._is_reminder = True

    def _append(self, between: str, text: str) -> None:
        last = self._placed[-1]
        content = f"{last['content']}{between}{text}" if last["content"] else text
        self._placed[-1] = {**last, "content": content}
