"""The formats of messages, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.tool_parsers.base import ReplyParser
from engine.tool_parsers.messages import harmony, inkling, muse
from engine.tool_parsers.parameters import Tool


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """A format whose response has its reasoning in messages."""

    make: Callable[[Sequence[Tool], str], ReplyParser]
    """Makes the parser of one response, from its tools and the end of its prompt."""
    answer: str
    """The text that begins the answer."""
    signs_of_calls: tuple[str, ...]
    """Texts without which a response contains no call."""
    tags: tuple[str, ...]
    """Texts that are special tokens in some tokenizers."""


MESSAGE_FORMATS: Mapping[str, MessageFormat] = {
    "openai": MessageFormat(
        harmony.HarmonyParser,
        harmony.FINAL,
        (harmony.RECIPIENT,),
        (harmony.START, harmony.CHANNEL, harmony.MESSAGE, "<|constrain|>", "<|end|>"),
    ),
    "muse": MessageFormat(
        muse.MuseParser,
        muse.ANSWER,
        muse.AtemToolParser.tags.opening.texts,
        (muse.START, muse.MESSAGE, "<|start|>", "<|eom|>", "<|eot|>", *muse.AtemToolParser.tags.sections),
    ),
    "inkling": MessageFormat(
        inkling.InklingParser,
        inkling.ANSWER,
        (inkling.CALL,),
        (inkling.START, *inkling.InklingParser.heads_end, *inkling.ENDS),
    ),
}
