"""Reads the pictures and clips of requests: finds their files, fetches and decodes them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.config.media import MediaConfig
from engine.media.limits import MediaFault
from engine.media.sources import (
    InlineMedia,
    MediaSource,
    Part,
    RemoteMedia,
    check_file,
    media_source,
    read_inline,
)
from engine.media.store import MediaLease, MediaStore, StoredMedia
from engine.process.fair_threads import FairThreads
from engine.records.media import MediaKind, MediaModels

if TYPE_CHECKING:
    from engine.media.downloads import MediaDownloads

MAX_KNOWN_URLS = 16384
READ_THREADS = 2
"""Threads that decode base64 and hash."""
_LIBRARIES = {MediaKind.IMAGE: ("PIL",), MediaKind.AUDIO: ("soundfile", "soxr")}
INSTALLS = {
    MediaKind.IMAGE: "pip install 'continuum-engine[pictures]'",
    MediaKind.AUDIO: "pip install 'continuum-engine[audio]'",
}
"""The command that installs the libraries of each kind."""


def can_decode(kind: MediaKind) -> bool:
    """Whether the libraries that decode such files are installed."""
    return all(find_spec(name) is not None for name in _LIBRARIES[kind])


def decodable(models: MediaModels | None) -> MediaModels | None:
    """The kinds that a model reads and this installation decodes; None if there are none."""
    if models is None:
        return None
    read = MediaModels(
        models.image if can_decode(MediaKind.IMAGE) else None,
        models.audio if can_decode(MediaKind.AUDIO) else None,
    )
    return read if read.all else None


@dataclass(frozen=True, slots=True)
class AskedMedia:
    """A picture or clip in a request."""

    kind: MediaKind
    source: MediaSource | MediaFault
    """Where its file is, or why it cannot be read."""
    is_new: bool = True
    """Whether this turn adds it. An older one at a URL is not fetched again if it is still in the
    store."""


class MediaReader:
    """Reads the media of all requests of one process. Use it from one event loop at a time, but any
    thread."""

    def __init__(self, models: MediaModels, config: MediaConfig, max_held_bytes: int | None = None) -> None:
        """``max_held_bytes``: see ``MediaStore``."""
        self.models = models
        self.store = MediaStore(models, config.max_idle_bytes, max_held_bytes)
        self._allowed_hosts = config.allowed_media_domains
        self._threads = FairThreads(READ_THREADS, "media-reader")
        self._urls: OrderedDict[tuple[str | None, MediaKind, str], str] = OrderedDict()
        """Hash of the file that was last found at a URL, by owner, kind and URL."""

    @cached_property
    def _downloads(self) -> MediaDownloads:
        from engine.media.downloads import MediaDownloads  # and an HTTP client

        return MediaDownloads(self._allowed_hosts)

    def source(self, part: Part) -> MediaSource:
        """Where the file of a content part is; MediaFault if it may not be read from there."""
        source = media_source(part)
        if isinstance(source, RemoteMedia):
            self._downloads.check(source.url)
        return source

    async def read(
        self, asked: Sequence[AskedMedia], owner: str | None, lease: MediaLease | None
    ) -> list[StoredMedia | MediaFault]:
        """Returns the files in order, held by the lease; without a lease, only their sizes.

        Raises MediaFailure if there is no room for them.
        """
        tasks = [asyncio.ensure_future(self._read_or_fault(each, owner, lease)) for each in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _read_or_fault(
        self, asked: AskedMedia, owner: str | None, lease: MediaLease | None
    ) -> StoredMedia | MediaFault:
        if isinstance(asked.source, MediaFault):
            return asked.source
        try:
            if isinstance(asked.source, InlineMedia):
                return await self._read_inline(asked.source, asked.kind, owner, lease)
            return await self._read_remote(asked.source.url, asked, owner, lease)
        except MediaFault as fault:
            return fault

    async def _read_inline(
        self, source: InlineMedia, kind: MediaKind, owner: str | None, lease: MediaLease | None
    ) -> StoredMedia:
        def read() -> Future[StoredMedia]:
            data = read_inline(source, kind)
            return self.store.get(self.store.hash_of(data, kind, owner), data, kind, lease, owner)

        found = await asyncio.wrap_future(self._threads.submit(owner or "", read))
        return await asyncio.wrap_future(found)

    async def _read_remote(
        self, url: str, asked: AskedMedia, owner: str | None, lease: MediaLease | None
    ) -> StoredMedia:
        kind = asked.kind
        place = owner, kind, url
        known = self._urls.get(place)
        if known is not None and not asked.is_new and (stored := self.store.find(known, lease)) is not None:
            self._urls.move_to_end(place)
            return stored
        data = await self._downloads.fetch(url, kind, owner)
        check_file(data, kind)
        hashing = self._threads.submit(owner or "", partial(self.store.hash_of, data, kind, owner))
        name = await asyncio.wrap_future(hashing)
        self._urls[place] = name
        if len(self._urls) > MAX_KNOWN_URLS:
            self._urls.popitem(last=False)
        return await asyncio.wrap_future(self.store.get(name, data, kind, lease, owner))

    def close(self) -> None:
        """Ends all threads and processes, and removes all stored files. Repeatable."""
        self._threads.close()
        self.store.close()
