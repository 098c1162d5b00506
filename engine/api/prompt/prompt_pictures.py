"""The pictures of one request, from its body to its prompt.

While a conversation is converted, a mark in the texts represents each picture: it moves with the text when
texts are merged or moved. No client can write a mark, since part of it is random. Before the template is
rendered, each mark becomes a separate part, or a line of text if its picture is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from engine.api.errors import OverloadedError
from engine.api.prompt.chat_messages import Message
from engine.errors import RequestError
from engine.media.limits import PictureFault, PixelsFailure
from engine.media.reader import AskedPicture, PictureReader
from engine.media.sources import PictureSource
from engine.media.store import PictureLease, StoredPicture
from engine.tokenization.parted_text import PartedText
from engine.tokenization.picture_parts import PICTURE_PART

DROP_SHARE = 4
"""If a history has too many pictures, they are left out in steps of the limit divided by this: if one more
picture were dropped every turn, each prompt would begin differently."""


@dataclass(slots=True)
class _Asked:
    source: PictureSource | PictureFault
    where: str
    is_new: bool
    describe: Callable[[], str]
    """A short description of the part, for the text that may replace it."""
    shown: StoredPicture | str | None = None
    """The picture, or the text that replaces it; None until it is read."""


class PromptPictures:
    """Collects the pictures of a body, then reads them once for each prompt made from it."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader = reader
        self._asked: list[_Asked] = []
        nonce = token_hex(8)
        self._mark = f"<picture {nonce} %d>"
        self._pattern = re.compile(rf"\n?<picture {nonce} (\d+)>\n?")
        self._in_bytes = re.compile(rf"<picture {nonce} (\d+)>".encode())
        self.notes: list[str] = []
        """Notes on pictures left out of the last prompt, for the receipt."""
        self._shown: list[StoredPicture] = []
        """The pictures of the last prompt."""

    def mark(self, part: Mapping[str, Any], where: str, describe: Callable[[], str], *, is_new: bool) -> str:
        """Returns a mark for a part that is a picture. RequestError if it is new and cannot be read."""
        try:
            source: PictureSource | PictureFault = self._reader.source(part)
        except PictureFault as fault:
            if is_new:
                raise _refused(where, fault) from fault
            source = fault
        self._asked.append(_Asked(source, where, is_new, describe))
        return self._mark % (len(self._asked) - 1)

    @property
    def has_any(self) -> bool:
        """Whether the messages contain a picture, whether or not it will be shown."""
        return bool(self._asked)

    async def read(
        self, messages: Sequence[Message], owner: str | None, lease: PictureLease | None
    ) -> list[StoredPicture]:
        """Reads the pictures of a conversation, whose contents are strings. The lease holds them; without one
        only their sizes are needed. RequestError for a new one that cannot be shown; others are left out."""
        self.notes = []
        asked = self._in_order(messages)
        wanted = self._without_oldest(asked)
        sources = [AskedPicture(each.source, each.is_new) for each in wanted]
        try:
            found = await self._reader.read(sources, owner, lease)
        except PixelsFailure as error:
            raise OverloadedError(str(error)) from error
        for each, picture in zip(wanted, found, strict=True):
            if isinstance(picture, StoredPicture):
                each.shown = picture
            elif each.is_new:
                raise _refused(each.where, picture) from picture
            else:
                self._leave_out(each, f"it {picture}")
        self._shown = [each.shown for each in asked if isinstance(each.shown, StoredPicture)]
        return self._shown

    def resolved(self, messages: Sequence[Message]) -> list[Message]:
        """Replaces the marks in messages: by parts for the pictures that were read, by texts for others."""
        return [self._resolved(message) for message in messages]

    def by_content(self, data: bytes) -> bytes:
        """Replaces each mark in JSON by its picture's hash, so that it can be compared with other
        requests."""
        return self._in_bytes.sub(lambda mark: self._content(int(mark[1])), data)

    def named_tokens(self, token_ids: list[int]) -> list[int]:
        """Returns the last prompt with the token of each picture replaced by a negative number of its
        content, because pictures of the same size have the same tokens."""
        if not self._shown:
            return token_ids
        model = self._reader.model
        named = list(token_ids)
        start = 0
        for picture in self._shown:
            start = named.index(model.token_id, start)
            length = model.num_tokens(picture.height, picture.width)
            named[start : start + length] = [-int(picture.content_hash[:7], 16) - 1] * length
            start += length
        return named

    def _content(self, index: int) -> bytes:
        shown = self._asked[index].shown
        return (shown.content_hash if isinstance(shown, StoredPicture) else str(shown)).encode()

    def _in_order(self, messages: Sequence[Message]) -> list[_Asked]:
        if not self._asked:
            return []
        texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
        return [self._asked[int(mark[1])] for text in texts for mark in self._pattern.finditer(text)]

    def _without_oldest(self, asked: list[_Asked]) -> list[_Asked]:
        """Returns those to show, of too many not the oldest. RequestError if there are too many new ones."""
        limit = self._reader.model.max_pictures
        num_new = sum(each.is_new for each in asked)
        if num_new > limit:
            where = next(each.where for each in asked if each.is_new)
            raise RequestError(
                f"{where} is one of {num_new} pictures in the last message; this server takes {limit} in a "
                "prompt (--limit-mm-per-prompt).",
                where,
            )
        num_beyond = 0
        if len(asked) > limit:
            step = max(1, limit // DROP_SHARE)
            num_beyond = min(-(-(len(asked) - limit) // step) * step, len(asked) - num_new)
        for each in asked[:num_beyond]:
            self._leave_out(each, f"only the latest of {len(asked)} pictures are shown")
        return asked[num_beyond:]

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
        whole = PartedText.of(parts) if PICTURE_PART not in parts else parts
        return {**message, "content": whole}

    def _pieces(self, text: str) -> list[Any]:
        """Cuts a text at its marks, and replaces these."""
        pieces: list[Any] = []
        start = 0
        for mark in self._pattern.finditer(text):
            shown = self._asked[int(mark[1])].shown
            picture = dict(PICTURE_PART) if isinstance(shown, StoredPicture) else str(shown)
            pieces += [piece for piece in (text[start : mark.start()], picture) if piece]
            start = mark.end()
        rest = text[start:]
        return [*pieces, rest] if rest or not pieces else pieces


def _refused(where: str, fault: PictureFault) -> RequestError:
    return RequestError(f"{where} {fault}.", where)
