"""Pictures in the prompts and conversations of ``LLM``. All come from the caller, so none is left out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.media import MediaConfig
from engine.errors import EngineGenerateError, RequestError
from engine.frontend.prompts import PromptInput
from engine.media.limits import PictureFault, PixelsFailure
from engine.media.placeholders import Placeholders
from engine.media.reader import AskedPicture, PictureReader, can_decode
from engine.media.resizing import fitted_size
from engine.media.sources import InlinePicture, RemotePicture, check_file, is_picture
from engine.media.store import PictureLease, StoredPicture
from engine.records.messages import MediaSpan
from engine.records.picture import PictureModel
from engine.tokenization.picture_parts import PICTURE_PART
from engine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

Message = Mapping[str, Any]

UNLIMITED = 2**63
"""No limit: a call receives all of its pictures at once, so the caller chooses their number."""


class PictureInputs:
    """The pictures of one engine; with ``model`` None it reads only text."""

    def __init__(self, tokenizer: Tokenizer, model: PictureModel | None, config: MediaConfig) -> None:
        self._tokenizer = tokenizer
        self._reader: PictureReader | None = None
        self._placeholders: Placeholders | None = None
        if model is not None and tokenizer.has_texts:
            self._placeholders = Placeholders(tokenizer, model)
            self._reader = PictureReader(model, config, UNLIMITED) if can_decode() else None

    def lease(self) -> AbstractContextManager[PictureLease | None]:
        """Returns a lease that holds the pictures of a call while the context is open."""
        return nullcontext() if self._reader is None else self._reader.store.lease()

    def expanded(
        self, given: PromptInput, lease: PictureLease | None
    ) -> tuple[str | list[int], tuple[MediaSpan, ...]]:
        """Returns the prompt as the engine takes it, and the positions of its pictures. RequestError names a
        picture that cannot be shown."""
        if not given.pictures:
            return given.prompt, ()
        reader, placeholders = self._needed()
        where = given.pictures[0][1]
        limit = reader.model.max_pictures
        if len(given.pictures) > limit:
            raise RequestError(
                f"{where} is one of {len(given.pictures)} pictures; a prompt takes {limit} "
                "(limit_mm_per_prompt).",
                where,
            )
        assert lease is not None
        pictures = [self._read(reader, picture, place, lease) for picture, place in given.pictures]
        prompt = given.prompt
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return placeholders.expanded(token_ids, pictures)

    def rendered(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str], *, in_parts: bool
    ) -> PromptInput:
        """Renders a conversation to a prompt, with placeholders for its pictures."""
        if self._placeholders is None:
            return PromptInput(self._encode(render(messages)))
        pictures: list[tuple[Any, str]] = []
        shown = [
            {**message, "content": self._parts(message["content"], f"messages[{index}].content", pictures)}
            if isinstance(message.get("content"), list)
            else dict(message)
            for index, message in enumerate(messages)
        ]
        blinded = self._placeholders.blind(shown)
        text = self._placeholders.rendered(blinded, len(pictures), render, in_parts=in_parts)
        return PromptInput(self._encode(text), pictures)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _parts(self, parts: list[Any], where: str, pictures: list[tuple[Any, str]]) -> list[Any]:
        """Returns the parts with placeholders, and adds the pictures for these to ``pictures``."""
        shown = []
        for index, part in enumerate(parts):
            place = f"{where}[{index}]"
            if not isinstance(part, Mapping) or not (is_picture(part) or "image_pil" in part):
                shown.append(part)
                continue
            reader, _ = self._needed()
            try:
                own = part.get("image_pil", part.get("image"))
                pictures.append((reader.source(part) if own is None else own, place))
            except PictureFault as fault:
                raise RequestError(f"{place} {fault}.", place) from fault
            shown.append(dict(PICTURE_PART))
        return shown

    def _needed(self) -> tuple[PictureReader, Placeholders]:
        if self._placeholders is None:
            raise RequestError("This model reads text only, got a picture.", "multi_modal_data")
        if self._reader is None:
            raise RequestError(
                "Pictures need Pillow: pip install 'continuum-engine[pictures]'.", "multi_modal_data"
            )
        return self._reader, self._placeholders

    def _read(self, reader: PictureReader, picture: Any, where: str, lease: PictureLease) -> StoredPicture:
        try:
            if isinstance(picture, InlinePicture | RemotePicture):
                found = _run_alone(reader, AskedPicture(picture), lease)
                if isinstance(found, PictureFault):
                    raise found
                return found
            if isinstance(picture, str | os.PathLike):
                picture = _file(picture)
            if isinstance(picture, bytes):
                check_file(picture)
                return reader.store.get(reader.store.hash_of(picture, None), picture, lease).result()
            return _own_picture(reader, picture, lease)
        except PictureFault as fault:
            raise RequestError(f"{where} {fault}.", where) from fault
        except PixelsFailure as error:
            raise EngineGenerateError(str(error)) from error

    def clear(self) -> bool:
        """Removes pixels that no call needs; returns whether the model reads pictures."""
        if self._reader is not None:
            self._reader.store.clear()
        return self._reader is not None

    def close(self) -> None:
        """Removes all pixels. Repeatable."""
        if self._reader is not None:
            self._reader.close()


def _file(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PictureFault(f"cannot be read: {error.strerror}") from error


def _run_alone(
    reader: PictureReader, asked: AskedPicture, lease: PictureLease
) -> StoredPicture | PictureFault:
    """Reads on another thread, since the caller's thread may have a running event loop, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        read: Future[list[StoredPicture | PictureFault]] = thread.submit(
            lambda: asyncio.run(reader.read([asked], None, lease))
        )
        return read.result()[0]


def _own_picture(reader: PictureReader, picture: Image, lease: PictureLease) -> StoredPicture:
    """Stores a picture that the caller has opened: it is trusted, and stored as shown."""
    from PIL import Image

    from engine.media.decoding import in_rgb, write_pixels

    if not isinstance(picture, Image.Image):
        raise PictureFault(f"must be a picture of Pillow, bytes or a path, got {type(picture).__name__}")
    rgb = in_rgb(picture)
    fitted = fitted_size(rgb.height, rgb.width, reader.model)
    content = sha256(rgb.tobytes()).digest() + rgb.width.to_bytes(8, "big")

    def write(path: str) -> tuple[int, int]:
        write_pixels(rgb, fitted, path)
        return fitted

    return reader.store.put(reader.store.hash_of(content, None), write, lease)
