"""Pictures and clips in the prompts and conversations of ``LLM``. All come from the caller, so none is left
out."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config.media import MediaConfig
from engine.errors import EngineGenerateError, RequestError
from engine.frontend.prompts import GivenMedia, PromptInput
from engine.media.limits import MediaFailure, MediaFault
from engine.media.placeholders import Placeholders
from engine.media.reader import INSTALLS, AskedMedia, MediaReader, decodable
from engine.media.resizing import fitted_size
from engine.media.sources import InlineMedia, RemoteMedia, check_file, media_kind
from engine.media.store import MediaLease, StoredMedia
from engine.records.media import AudioModel, ClipSize, MediaKind, MediaModels, PictureModel, PictureSize
from engine.records.messages import MediaSpan
from engine.tokenization.media_parts import MEDIA_PARTS
from engine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

Message = Mapping[str, Any]

UNLIMITED = 2**63
"""No limit: a call receives all of its media at once, so the caller chooses their number."""
_OWN_PARTS = {"image_pil": MediaKind.IMAGE}
"""Fields of parts that hold an object of the caller."""


class MediaInputs:
    """The pictures and clips of one engine; with ``models`` None it reads only text."""

    def __init__(self, tokenizer: Tokenizer, models: MediaModels | None, config: MediaConfig) -> None:
        self._tokenizer = tokenizer
        self._models = models
        self._reader: MediaReader | None = None
        self._placeholders: Placeholders | None = None
        if models is not None and tokenizer.has_texts:
            self._placeholders = Placeholders(tokenizer, models)
            read = decodable(models)
            self._reader = None if read is None else MediaReader(read, config, UNLIMITED)

    def lease(self) -> AbstractContextManager[MediaLease | None]:
        """Returns a lease that holds the media of a call while the context is open."""
        return nullcontext() if self._reader is None else self._reader.store.lease()

    def expanded(
        self, given: PromptInput, lease: MediaLease | None
    ) -> tuple[str | list[int], tuple[MediaSpan, ...]]:
        """Returns the prompt as the engine takes it, and the positions of its media. RequestError names one
        that cannot be shown."""
        if not given.media:
            return given.prompt, ()
        self._check_counts(given.media)
        assert lease is not None
        media = [self._read(each, lease) for each in given.media]
        prompt = given.prompt
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert self._placeholders is not None
        return self._placeholders.expanded(token_ids, media)

    def _check_counts(self, media: Sequence[GivenMedia]) -> None:
        for kind, count in Counter(each.kind for each in media).items():
            where = next(each.where for each in media if each.kind is kind)
            limit = self._model(kind).max_count
            if count > limit:
                raise RequestError(
                    f"{where} is one of {count} {kind.noun}s; a prompt takes {limit} (limit_mm_per_prompt).",
                    where,
                )

    def rendered(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str], *, in_parts: bool
    ) -> PromptInput:
        """Renders a conversation to a prompt, with placeholders for its pictures and clips."""
        if self._placeholders is None:
            return PromptInput(self._encode(render(messages)))
        media: list[GivenMedia] = []
        shown = [
            {**message, "content": self._parts(message["content"], f"messages[{index}].content", media)}
            if isinstance(message.get("content"), list)
            else dict(message)
            for index, message in enumerate(messages)
        ]
        blinded = self._placeholders.blind(shown)
        counts = Counter(each.kind for each in media)
        text = self._placeholders.rendered(blinded, counts, render, in_parts=in_parts)
        return PromptInput(self._encode(text), media)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _parts(self, parts: list[Any], where: str, media: list[GivenMedia]) -> list[Any]:
        """Returns the parts with placeholders, and adds what these stand for to ``media``."""
        shown = []
        for index, part in enumerate(parts):
            place = f"{where}[{index}]"
            kind = _kind_of(part) if isinstance(part, Mapping) else None
            if kind is None:
                shown.append(part)
                continue
            self._model(kind)
            reader = self._reader
            assert reader is not None
            try:
                own = part.get("image_pil", part.get(str(kind)))
                media.append(GivenMedia(kind, reader.source(part) if own is None else own, place))
            except MediaFault as fault:
                raise RequestError(f"{place} {fault}.", place) from fault
            shown.append(dict(MEDIA_PARTS[kind]))
        return shown

    def _model(self, kind: MediaKind) -> PictureModel | AudioModel:
        """How the model reads this kind. RequestError if it does not, or its files cannot be decoded here."""
        models = None if self._placeholders is None else self._models
        model = None if models is None else models.of(kind)
        if model is None:
            reads = "text only" if models is None else f"text and {models.nouns} only"
            raise RequestError(f"This model reads {reads}, got a {kind.noun}.", "multi_modal_data")
        if self._reader is None or self._reader.models.of(kind) is None:
            raise RequestError(f"{kind.noun.capitalize()}s need: {INSTALLS[kind]}.", "multi_modal_data")
        return model

    def _read(self, given: GivenMedia, lease: MediaLease) -> StoredMedia:
        reader = self._reader
        assert reader is not None, "_model() has checked it"
        value = given.value
        where = given.where
        try:
            if isinstance(value, InlineMedia | RemoteMedia):
                found = _run_alone(reader, AskedMedia(given.kind, value), lease)
                if isinstance(found, MediaFault):
                    raise found
                return found
            if isinstance(value, str | os.PathLike):
                value = _file(value)
            if isinstance(value, bytes):
                check_file(value, given.kind)
                name = reader.store.hash_of(value, given.kind, None)
                return reader.store.get(name, value, given.kind, lease).result()
            own = _own_picture if given.kind is MediaKind.IMAGE else _own_clip
            return own(reader, value, lease)
        except MediaFault as fault:
            raise RequestError(f"{where} {fault}.", where) from fault
        except MediaFailure as error:
            raise EngineGenerateError(str(error)) from error

    def clear(self) -> bool:
        """Removes files that no call needs; returns whether the model reads pictures or audio."""
        if self._reader is not None:
            self._reader.store.clear()
        return self._reader is not None

    def close(self) -> None:
        """Removes all files. Repeatable."""
        if self._reader is not None:
            self._reader.close()


def _kind_of(part: Mapping[str, Any]) -> MediaKind | None:
    own = (kind for name, kind in _OWN_PARTS.items() if name in part)
    return next(own, None) or media_kind(part)


def _file(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise MediaFault(f"cannot be read: {error.strerror}") from error


def _run_alone(reader: MediaReader, asked: AskedMedia, lease: MediaLease) -> StoredMedia | MediaFault:
    """Reads on another thread, since the caller's thread may have a running event loop, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        read: Future[list[StoredMedia | MediaFault]] = thread.submit(
            lambda: asyncio.run(reader.read([asked], None, lease))
        )
        return read.result()[0]


def _own_picture(reader: MediaReader, picture: Image, lease: MediaLease) -> StoredMedia:
    """Stores a picture that the caller has opened: it is trusted, and stored as shown."""
    from PIL import Image

    from engine.media.decoding import in_rgb, write_pixels

    if not isinstance(picture, Image.Image):
        raise MediaFault(f"must be a picture of Pillow, bytes or a path, got {type(picture).__name__}")
    rgb = in_rgb(picture)
    model = reader.models.image
    assert model is not None
    fitted = fitted_size(rgb.height, rgb.width, model)
    content = sha256(rgb.tobytes()).digest() + rgb.width.to_bytes(8, "big")

    def write(path: str) -> PictureSize:
        write_pixels(rgb, fitted, path)
        return fitted

    return reader.store.put(reader.store.hash_of(content, MediaKind.IMAGE, None), write, lease)


def _own_clip(reader: MediaReader, given: Any, lease: MediaLease) -> StoredMedia:
    """Stores samples of the caller: an array at the model's rate, or an array and its rate."""
    from engine.media.audio_decoding import resampled, write_samples

    model = reader.models.audio
    assert model is not None
    values, rate = given if isinstance(given, tuple) and len(given) == 2 else (given, model.sampling_rate)
    samples = np.asarray(values)
    if samples.ndim != 1 or samples.dtype.kind != "f" or not isinstance(rate, int) or rate < 1:
        raise MediaFault(
            "must be bytes, a path, an array of samples [num_samples] in floats, or that and its rate"
        )
    heard = resampled(samples.astype(np.float32), rate, model)

    def write(path: str) -> ClipSize:
        return write_samples(heard, model, path)

    name = reader.store.hash_of(heard.tobytes(), MediaKind.AUDIO, None)
    return reader.store.put(name, write, lease)
