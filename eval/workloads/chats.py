"""Files of chats that are one JSON list: ShareGPT's, and what vLLM's multi-turn benchmark reads.

Neither has times: a replay asks again as soon as it is answered. Tokens are estimated from the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from eval.errors import UNREADABLE
from eval.workloads.checks import JobChecks
from eval.workloads.job import Job
from eval.workloads.jsonl import Place, in_words, read_bytes
from eval.workloads.transcript import Exchange, Transcript

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("tool", "function"), "user"),
}
"""Who speaks, by the names that the files in circulation use; a tool's result is input like a user's."""


class ShareGptMessage(msgspec.Struct, kw_only=True):
    """One message; ``from`` is a word of Python."""

    speaker: str = msgspec.field(name="from")
    value: str


class ShareGptChat(msgspec.Struct, kw_only=True):
    """One conversation of ShareGPT."""

    id: str
    conversations: list[ShareGptMessage]


class OpenAiMessage(msgspec.Struct, kw_only=True):
    """One message as OpenAI's API has it, text only."""

    role: str
    content: str


class OpenAiChat(msgspec.Struct, kw_only=True):
    """One conversation of vLLM's multi-turn benchmark."""

    id: str | int
    messages: list[OpenAiMessage]


Chat = TypeVar("Chat", ShareGptChat, OpenAiChat)


def read_sharegpt(path: Path) -> tuple[list[Job], list[str]]:
    """The conversations of a ShareGPT file; WorkloadError names the entry that is wrong.

    Messages before the first question are left out (a chat cut into parts goes on in the middle).
    """
    spoken = (
        (place, chat.id, [(message.speaker, message.value) for message in chat.conversations])
        for place, chat in _entries(path, ShareGptChat)
    )
    return _jobs(path, spoken)


def read_openai_chats(path: Path) -> tuple[list[Job], list[str]]:
    """The conversations of a file for vLLM's multi-turn benchmark; WorkloadError names the entry."""
    spoken = (
        (place, str(chat.id), [(message.role, message.content) for message in chat.messages])
        for place, chat in _entries(path, OpenAiChat)
    )
    return _jobs(path, spoken)


def _entries(path: Path, chat: type[Chat]) -> Iterable[tuple[Place, Chat]]:
    try:
        entries = msgspec.json.decode(read_bytes(path), type=list[msgspec.Raw])
    except UNREADABLE as error:
        raise Place(path).error(f"not a list of conversations: {in_words(error)}") from error
    decoder = msgspec.json.Decoder(chat)
    for number, entry in enumerate(entries, start=1):
        place = Place(path, entry=number)
        try:
            yield place, decoder.decode(entry)
        except UNREADABLE as error:
            raise place.error(f"not a conversation: {in_words(error)}") from error


def _jobs(
    path: Path, chats: Iterable[tuple[Place, str, list[tuple[str, str]]]]
) -> tuple[list[Job], list[str]]:
    checks = JobChecks()
    jobs: list[Job] = []
    num_empty = 0
    for place, chat_id, messages in chats:
        transcript = _transcript(messages, place)
        if len(transcript):
            jobs.append(checks.check(transcript.job(chat_id, path.stem), place))
        else:
            num_empty += 1
    return jobs, [f"{num_empty} conversations without a question and an answer were left out"] * bool(
        num_empty
    )


def _transcript(messages: list[tuple[str, str]], place: Place) -> Transcript:
    """Turns of all that was said up to an answer, and the answer. A question at the end is left out."""
    roles = [_role(speaker, number, place) for number, (speaker, _) in enumerate(messages, start=1)]
    first = roles.index("user") if "user" in roles else len(roles)
    system = [text for role, (_, text) in zip(roles[:first], messages, strict=False) if role == "system"]
    transcript = Transcript("\n\n".join(system))
    asked: list[str] = []
    for role, (_, text) in zip(roles[first:], messages[first:], strict=True):
        if role != "assistant":
            asked.append(text)
        else:
            transcript.add(Exchange(input_text="\n\n".join(asked), output_text=text))
            asked = []
    return transcript


def _role(speaker: str, number: int, place: Place) -> str:
    role = _ROLES.get(speaker)
    if role is None:
        raise place.error(f"message {number}: nobody knows the speaker {speaker!r}")
    return role
