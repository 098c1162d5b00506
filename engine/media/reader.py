"""Reads the pictures of requests: finds their files, fetches and decodes them."""

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
from engine.media.limits import PictureFault
from engine.media.sources import (
    InlinePicture,
    Part,
    PictureSource,
    RemotePicture,
    check_file,
    picture_source,
    read_inline,
)
from engine.media.store import PictureLease, PictureStore, StoredPicture
from engine.process.fair_threads import FairThreads
from engine.records.picture import PictureModel

if TYPE_CHECKING:
    from engine.media.downloads import PictureDownloads

MAX_KNOWN_URLS = 16384
READ_THREADS = 2
"""Threads that decode base64 and hash."""


def can_decode() -> bool:
    """Whether Pillow is installed."""
    return find_spec("PIL") is not None


@dataclass(frozen=True, slots=True)
class AskedPicture:
    """A picture in a request."""

    source: PictureSource | PictureFault
    """Where the picture is, or why it cannot be read."""
    is_new: bool = True
    """Whether this turn adds the picture. An older one at a URL is not fetched again if it is still in the
    store."""


class PictureReader:
    """Reads the pictures of all requests of one process. Use it from one event loop at a time, but any
    thread."""

    def __init__(self, model: PictureModel, config: MediaConfig, max_held_bytes: int | None = None) -> None:
        """``max_held_bytes``: see ``PictureStore``."""
        self.model = model
        self.store = PictureStore(model, config.max_idle_bytes, max_held_bytes)
        self._allowed_hosts = config.allowed_media_domains
        self._threads = FairThreads(READ_THREADS, "picture-reader")
        self._urls: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        """Hash of the file that was last found at a URL, by owner and URL."""

    @cached_property
    def _downloads(self) -> PictureDownloads:
        from engine.media.downloads import PictureDownloads  # and an HTTP client

        return PictureDownloads(self._allowed_hosts)

    def source(self, part: Part) -> PictureSource:
        """Where the picture of a content part is; PictureFault if it may not be read from there."""
        source = picture_source(part)
        if isinstance(source, RemotePicture):
            self._downloads.check(source.url)
        return source

    async def read(
        self, asked: Sequence[AskedPicture], owner: str | None, lease: PictureLease | None
    ) -> list[StoredPicture | PictureFault]:
        """Returns the pictures in order, held by the lease; without a lease, only their sizes.

        Raises PixelsFailure if there is no room for them.
        """
        tasks = [asyncio.ensure_future(self._read_or_fault(each, owner, lease)) for each in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _read_or_fault(
        self, asked: AskedPicture, owner: str | None, lease: PictureLease | None
    ) -> StoredPicture | PictureFault:
        if isinstance(asked.source, PictureFault):
            return asked.source
        try:
            if isinstance(asked.source, InlinePicture):
                return await self._read_inline(asked.source, owner, lease)
            return await self._read_remote(asked.source.url, asked.is_new, owner, lease)
        except PictureFault as fault:
            return fault

    async def _read_inline(
        self, source: InlinePicture, owner: str | None, lease: PictureLease | None
    ) -> StoredPicture:
        def read() -> Future[StoredPicture]:
            data = read_inline(source)
            return self.store.get(self.store.hash_of(data, owner), data, lease, owner)

        found = await asyncio.wrap_future(self._threads.submit(owner or "", read))
        return await asyncio.wrap_future(found)

    async def _read_remote(
        self, url: str, is_new: bool, owner: str | None, lease: PictureLease | None
    ) -> StoredPicture:
        known = self._urls.get((owner, url))
        if known is not None and not is_new and (picture := self.store.find(known, lease)) is not None:
            self._urls.move_to_end((owner, url))
            return picture
        data = await self._downloads.fetch(url, owner)
        check_file(data)
        hashing = self._threads.submit(owner or "", partial(self.store.hash_of, data, owner))
        name = await asyncio.wrap_future(hashing)
        self._urls[owner, url] = name
        if len(self._urls) > MAX_KNOWN_URLS:
            self._urls.popitem(last=False)
        return await asyncio.wrap_future(self.store.get(name, data, lease, owner))

    def close(self) -> None:
        """Ends all threads and processes, and removes all pixels. Repeatable."""
        self._threads.close()
        self.store.close()
