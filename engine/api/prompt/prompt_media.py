"""The pictures and clips of one request, from its body to its prompt.

While a conversation is converted, a mark in the texts represents each of them: it moves with the text when
texts are merged or moved. No client can write a mark, since part of it is random. Before the template is
rendered, each mark becomes a separate part, or a line of text if its file is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from engine.api.errors import OverloadedError
from engine.api.prompt.chat_messages import Message
from engine.errors import RequestError
from engine.media.limits import MediaFailure, MediaFault
from engine.media.reader import AskedMedia, MediaReader
from engine.media.sources import MediaSource, media_kind
from engine.media.store import MediaLease, StoredMedia
from engine.records.media import MediaKind
from engine.tokenization.media_parts import MEDIA_PARTS
from engine.tokenization.parted_text import PartedText

DROP_SHARE = 4
"""If a history has too many pictures or clips, they are left out in steps of the limit divided by this: if
one more were dropped every turn, each prompt would begin differently."""


@dataclass(slots=True)
class _Asked:
    kind: MediaKind
    source: MediaSource | MediaFault
    where: str
    is_new: bool
    describe: Callable[[], str]
    """A short description of the part, for the text that may replace it."""
    shown: StoredMedia | str | None = None
    """The picture or clip, or the text that replaces it; None until it is read."""


class PromptMedia:
    """Collects the media of a body, then reads them once for each prompt made from it."""

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self._asked: list[_Asked] = []
        nonce = token_hex(8)
        self._mark = f"<media {nonce} %d>"
        self._pattern = re.compile(rf"\n?<media {nonce} (\d+)>\n?")
        self._in_bytes = re.compile(rf"<media {nonce} (\d+)>".encode())
        self.notes: list[str] = []
        """Notes on media left out of the last prompt, for the receipt."""
        self._shown: list[StoredMedia] = []
        """The media of the last prompt."""

    def reads(self, part: Mapping[str, Any]) -> bool:
        """Whether a part is of a kind that the model is shown."""
        kind = media_kind(part)
        return kind is not None and self._reader.models.of(kind) is not None

    @property
    def nouns(self) -> str:
        """The kinds that the model is shown, in words."""
        return self._reader.models.nouns

    def mark(self, part: Mapping[str, Any], where: str, describe: Callable[[], str], *, is_new: bool) -> str:
        """Returns a mark for a part that it ``reads``. RequestError if it is new and cannot be read."""
        kind = media_kind(part)
        assert kind is not None
        try:
            source: MediaSource | MediaFault = self._reader.source(part)
        except MediaFault as fault:
            if is_new:
                raise _refused(where, fault) from fault
            source = fault
        self._asked.append(_Asked(kind, source, where, is_new, describe))
        return self._mark % (len(self._asked) - 1)

    @property
    def has_any(self) -> bool:
        """Whether the messages contain a picture or clip, whether or not it will be shown."""
        return bool(self._asked)

    async def read(
        self, messages: Sequence[Message], owner: str | None, lease: MediaLease | None
    ) -> list[StoredMedia]:
        """Reads the media of a conversation, whose contents are strings. The lease holds them; without one
        only their sizes are needed. RequestError for a new one that cannot be shown; others are left out."""
        self.notes = []
        asked = self._in_order(messages)
        wanted = self._without_oldest(asked)
        sources = [AskedMedia(each.kind, each.source, each.is_new) for each in wanted]
        try:
            found = await self._reader.read(sources, owner, lease)
        except MediaFailure as error:
            raise OverloadedError(str(error)) from error
        for each, media in zip(wanted, found, strict=True):
            if isinstance(media, StoredMedia):
                each.shown = media
            elif each.is_new:
                raise _refused(each.where, media) from media
            else:
                self._leave_out(each, f"it {media}")
        self._shown = [each.shown for each in asked if isinstance(each.shown, StoredMedia)]
        return self._shown

    def resolved(self, messages: Sequence[Message]) -> list[Message]:
        """Replaces the marks in messages: by parts for the media that were read, by texts for others."""
        return [self._resolved(message) for message in messages]

    def by_content(self, data: bytes) -> bytes:
        """Replaces each mark in JSON by its file's hash, so that it can be compared with other
        requests."""
        return self._in_bytes.sub(lambda mark: self._content(int(mark[1])), data)

    def named_tokens(self, token_ids: list[int]) -> list[int]:
        """Returns the last prompt with the token of each picture and clip replaced by a negative number of
        its content, because those of the same size have the same tokens."""
        if not self._shown:
            return token_ids
        named = list(token_ids)
        starts = Counter[MediaKind]()
        for media in self._shown:
            model = self._reader.models.of(media.kind)
            assert model is not None
            start = named.index(model.token_id, starts[media.kind])
            length = model.num_tokens(media.size)
            named[start : start + length] = [-int(media.content_hash[:7], 16) - 1] * length
            starts[media.kind] = start + length
        return named

    def _content(self, index: int) -> bytes:
        shown = self._asked[index].shown
        return (shown.content_hash if isinstance(shown, StoredMedia) else str(shown)).encode()

    def _in_order(self, messages: Sequence[Message]) -> list[_Asked]:
        if not self._asked:
            return []
        texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
        return [self._asked[int(mark[1])] for text in texts for mark in self._pattern.finditer(text)]

    def _without_oldest(self, asked: list[_Asked]) -> list[_Asked]:
        """Returns those to show, of too many of a kind not the oldest. RequestError if there are too many new
        ones."""
        wanted: list[_Asked] = []
        for kind, model in self._reader.models.all.items():
            its = [each for each in asked if each.kind is kind]
            num_beyond = _num_beyond(its, kind, model.max_count)
            for each in its[:num_beyond]:
                self._leave_out(each, f"only the latest of {len(its)} {kind.noun}s are shown")
            wanted += its[num_beyond:]
        return wanted

    def _leave_out(self, asked: _Asked, why: str) -> None:
        what = asked.describe()
        asked.shown = f"[{what}, left out: {why}]"
        self.notes.append(f"{asked.where}: {what}")

    def _resolved(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str) or not self._pattern.search(content):
            return message
        texts = content.parts if isinstance(content, PartedText) else [str(content)]
        parts = [piece for text in texts for piece in self._pieces(text)]
        whole = PartedText.of(parts) if all(isinstance(part, str) for part in parts) else parts
        return {**message, "content": whole}

    def _pieces(self, text: str) -> list[Any]:
        """Cuts a text at its marks, and replaces these."""
        pieces: list[Any] = []
        start = 0
        for mark in self._pattern.finditer(text):
            shown = self._asked[int(mark[1])].shown
            media = dict(MEDIA_PARTS[shown.kind]) if isinstance(shown, StoredMedia) else str(shown)
            pieces += [piece for piece in (text[start : mark.start()], media) if piece]
            start = mark.end()
        rest = text[start:]
        return [*pieces, rest] if rest or not pieces else pieces


def _num_beyond(asked: list[_Asked], kind: MediaKind, limit: int) -> int:
    """How many of the oldest of a kind are left out. RequestError if there are too many new ones."""
    num_new = sum(each.is_new for each in asked)
    if num_new > limit:
        where = next(each.where for each in asked if each.is_new)
        raise RequestError(
            f"{where} is one of {num_new} {kind.noun}s in the last message; this server takes {limit} in a "
            "prompt (--limit-mm-per-prompt).",
            where,
        )
    if len(asked) <= limit:
        return 0
    step = max(1, limit // DROP_SHARE)
    return min(-(-(len(asked) - limit) // step) * step, len(asked) - num_new)


def _refused(where: str, fault: MediaFault) -> RequestError:
    return RequestError(f"{where} {fault}.", where)
