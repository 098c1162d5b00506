"""Files of chats, one per line or all in one JSON list: ShareGPT's, and those with messages in the form of
OpenAI's API (vLLM's multi-turn benchmark reads such lists; fine-tuning data has such lines).

Neither has times: a replay sends the next turn as soon as it has the answer. Tokens are estimated from the
text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eval.errors import UNREADABLE
from eval.workloads.call_arguments import tool_run
from eval.workloads.checks import JobChecks
from eval.workloads.job import GapKind, Job, ToolRun
from eval.workloads.jsonl import Place, read_lines
from eval.workloads.transcript import Exchange, Transcript

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function"), "user"),
}
"""Roles by the names that existing files use; a tool's result is input like a user's text."""


class ShareGptMessage(msgspec.Struct, kw_only=True):
    """One message; ``from`` is a Python keyword."""

    speaker: str = msgspec.field(name="from")
    value: str


class ShareGptChat(msgspec.Struct, kw_only=True):
    """One conversation of ShareGPT."""

    id: str | int | None = None
    conversations: list[ShareGptMessage]


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; images and audio have no text and are ignored."""

    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function that the model called."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b'""')
    """A JSON text; some files have the JSON value itself."""

    def __post_init__(self) -> None:
        """Decodes the text while the record is read, so that an error names its place."""
        try:
            self.text  # noqa: B018
        except UNREADABLE as error:
            raise ValueError(str(error)) from error

    @property
    def text(self) -> str:
        """Returns the arguments as text."""
        written = bytes(self.arguments)
        return msgspec.json.decode(written, type=str) if written.startswith(b'"') else written.decode()


class OpenAiCall(msgspec.Struct, kw_only=True):
    """One tool call of an assistant's message."""

    function: CalledFunction


class OpenAiMessage(msgspec.Struct, kw_only=True):
    """One message in the form of OpenAI's API."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[OpenAiCall] | None = None

    @property
    def called(self) -> list[CalledFunction]:
        return [call.function for call in self.tool_calls or ()]

    @property
    def text(self) -> str:
        """Returns all text of the message, and after it the calls, which the model wrote too."""
        parts = self.content if isinstance(self.content, list) else [ContentPart(text=self.content)]
        texts = [part.text for part in parts if part.text]
        return "\n".join([*texts, *(f"{call.name} {call.text}".rstrip() for call in self.called)])


class OpenAiChat(msgspec.Struct, kw_only=True):
    """One conversation of such messages."""

    id: str | int | None = None
    messages: list[OpenAiMessage]


@dataclass(frozen=True, slots=True)
class Said:
    """A message of either form."""

    speaker: str
    text: str
    calls: tuple[ToolRun, ...] = ()


def read_sharegpt(path: Path) -> tuple[list[Job], list[str]]:
    """Reads the conversations of a ShareGPT file; WorkloadError names an invalid entry.

    Leaves out messages before the first question (a chat that was cut into parts begins in the middle).
    """
    spoken = (
        (place, chat.id, [Said(message.speaker, message.value) for message in chat.conversations])
        for place, chat in read_lines(path, ShareGptChat, "a conversation")
    )
    return _jobs(path, spoken)


def read_openai_chats(path: Path) -> tuple[list[Job], list[str]]:
    """Reads the conversations of a file in the form of OpenAI's API; WorkloadError names an invalid entry."""
    spoken = (
        (place, chat.id, [_said(message) for message in chat.messages])
        for place, chat in read_lines(path, OpenAiChat, "a conversation")
    )
    return _jobs(path, spoken)


def _said(message: OpenAiMessage) -> Said:
    calls = tuple(tool_run(call.name, call.text) for call in message.called)
    return Said(message.role, message.text, calls)


def _jobs(
    path: Path, chats: Iterable[tuple[Place, str | int | None, list[Said]]]
) -> tuple[list[Job], list[str]]:
    checks = JobChecks()
    jobs: list[Job] = []
    num_empty = 0
    for index, (place, chat_id, messages) in enumerate(chats):
        transcript = _transcript(messages, place)
        name = f"chat-{index}" if chat_id is None else str(chat_id)
        if len(transcript):
            jobs.append(checks.check(transcript.job(name, path.stem), place))
        else:
            num_empty += 1
    return jobs, [f"{num_empty} conversations without a question and an answer were left out"] * bool(
        num_empty
    )


def _transcript(messages: list[Said], place: Place) -> Transcript:
    """Makes turns of everything said before an answer, and the answer. Leaves out a question at the end."""
    roles = [_role(said.speaker, number, place) for number, said in enumerate(messages, start=1)]
    first = roles.index("user") if "user" in roles else len(roles)
    system = [said.text for role, said in zip(roles[:first], messages, strict=False) if role == "system"]
    transcript = Transcript("\n\n".join(system))
    asked: list[str] = []
    for role, said in zip(roles[first:], messages[first:], strict=True):
        if role != "assistant":
            asked.append(said.text)
        else:
            transcript.add(_exchange("\n\n".join(asked), said))
            asked = []
    return transcript


def _exchange(asked: str, answer: Said) -> Exchange:
    """Classifies the time after the answer: tools ran if it has calls, else a person thought."""
    return Exchange(
        input_text=asked,
        output_text=answer.text,
        gap_kind=GapKind.TOOL if answer.calls else GapKind.USER,
        calls=answer.calls,
    )


def _role(speaker: str, number: int, place: Place) -> str:
    role = _ROLES.get(speaker)
    if role is None:
        raise place.error(f"message {number}: unknown speaker {speaker!r}")
    return role
