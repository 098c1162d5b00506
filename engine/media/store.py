"""Stores pictures in the size in which the model reads them, by the hash of their files: the next turn of a
job sends the same pictures again.

There is one store per API server process. The pixels are in files in memory, which the core reads. Pictures
that a request holds are kept; of the others, the least recently used are evicted.
"""

from __future__ import annotations

import atexit
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from threading import Lock
from types import TracebackType
from typing import Self

import msgspec

from engine.media.decoder import PictureDecoder
from engine.media.limits import PictureFault, PixelsFailure
from engine.process.fair_threads import FairThreads
from engine.process.private_folder import make_private_folder, remove_private_folder
from engine.records.picture import PictureModel, Pixels

_SHUTTING_DOWN = "The server is shutting down."
MAX_KNOWN = 16384
"""Maximum number of pictures whose size or fault is remembered."""
MIN_HELD_BYTES = 4 * 2**30
"""Requests may by default hold ``max_idle_bytes`` of pixels, but at least this many."""

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "continuum-pictures-"


@dataclass(slots=True, eq=False)
class StoredPicture:
    """A picture in the size in which the model reads it."""

    content_hash: str
    height: int
    width: int
    path: str | None
    """The file of its pixels; None if only the size was requested."""
    num_holders: int = 0

    @property
    def num_bytes(self) -> int:
        return self.height * self.width * 3

    @property
    def pixels(self) -> Pixels | None:
        return None if self.path is None else Pixels(self.path, self.height, self.width)


class PictureLease:
    """The pictures that one request holds, until it is released."""

    def __init__(self, store: PictureStore) -> None:
        self._store = store
        self.pictures: list[StoredPicture] = []
        self.is_released = False

    def release(self) -> None:
        """Releases the pictures of an ended request, also those that are still being decoded. Repeatable."""
        self._store.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class _Pending:
    """A picture that is being decoded, and the leases that wait for it."""

    future: Future[StoredPicture] = field(default_factory=Future)
    leases: list[PictureLease | None] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether any request still waits: one that has ended has released its lease."""
        return any(lease is None or not lease.is_released for lease in self.leases)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the store holds, and how many pictures it had to decode."""

    num_decoded: int
    num_held: int
    num_idle: int
    held_bytes: int
    idle_bytes: int


class PictureStore:
    """Starts and creates nothing before the first picture. Thread safe."""

    def __init__(self, model: PictureModel, max_idle_bytes: int, max_held_bytes: int | None = None) -> None:
        """``max_held_bytes``: maximum bytes that requests hold together; by default ``max_idle_bytes``, but
        at least MIN_HELD_BYTES."""
        self.on_lookup: Callable[[bool], object] = lambda found: None
        """Called for each picture that a request will hold, with whether it was already stored."""
        self._model = model
        self._max_idle_bytes = max_idle_bytes
        self._usual_bytes = max(max_idle_bytes, MIN_HELD_BYTES)
        self._max_held_bytes = self._usual_bytes if max_held_bytes is None else max_held_bytes
        self._decoder = PictureDecoder(model)
        self._thread = FairThreads(1, "picture-decoder")  # the process decodes one at a time
        self._lock = Lock()
        self._folder: str | None = None
        self._num_decoded = 0
        self._held: dict[str, StoredPicture] = {}
        self._idle: OrderedDict[str, StoredPicture] = OrderedDict()
        self._held_bytes = self._idle_bytes = 0
        self._pending: dict[str, _Pending] = {}
        self._known: OrderedDict[str, tuple[int, int] | str] = OrderedDict()
        """The size of a picture, or what is wrong with it, by its hash."""

    def hash_of(self, data: bytes, owner: str | None) -> str:
        """A hash of the file's content, of the owner, so that timing does not reveal what others have sent,
        and of the size limits, on which the pixels depend."""
        digest = sha256(data)
        limits = self._model.min_pixels, self._model.max_pixels, self._model.max_edge
        digest.update(msgspec.json.encode((*limits, owner)))
        return digest.hexdigest()

    def lease(self) -> PictureLease:
        """Returns an empty lease."""
        return PictureLease(self)

    def find(self, content_hash: str, lease: PictureLease | None) -> StoredPicture | None:
        """Returns a stored picture, held by the lease; None if it must be decoded. Without a lease, returns
        only its size. PictureFault if decoding has failed before."""
        with self._lock:
            found = self._find(content_hash, lease)
        if found is not None and lease is not None:
            self.on_lookup(True)
        return found

    def _find(self, content_hash: str, lease: PictureLease | None) -> StoredPicture | None:
        known = self._known.get(content_hash)
        if known is not None:
            self._known.move_to_end(content_hash)
        if isinstance(known, str):
            raise PictureFault(known)
        if lease is None:
            return None if known is None else StoredPicture(content_hash, *known, None)
        picture = self._held.get(content_hash) or self._idle.get(content_hash)
        if picture is not None:
            self._hold(picture, lease)
        return picture

    def get(
        self, content_hash: str, data: bytes, lease: PictureLease | None, owner: str | None = None
    ) -> Future[StoredPicture]:
        """Returns the picture of a file, decoding it if it is not stored; concurrent callers share one
        decoding. Owners take turns.

        The future may raise PictureFault or PixelsFailure. It is shared and cannot be cancelled; a picture is
        not decoded if no request waits for it at its turn.
        """
        with self._lock:
            known = content_hash in self._known
            future = self._get(content_hash, data, lease, owner or "")
        if lease is not None:
            self.on_lookup(known and future.done())
        return future

    def _get(
        self, content_hash: str, data: bytes, lease: PictureLease | None, owner: str
    ) -> Future[StoredPicture]:
        try:
            if (picture := self._find(content_hash, lease)) is not None:
                return _done(picture)
        except (PictureFault, PixelsFailure) as error:
            return _failed(error)
        pending = self._pending.get(content_hash)
        if pending is None:
            if self._held_bytes >= self._max_held_bytes:
                return _failed(self._no_room())
            pending = self._pending[content_hash] = _Pending()
            pending.future.set_running_or_notify_cancel()
            write = partial(self._decoder.decode, data)
            if self._thread.submit(owner, partial(self._make, content_hash, write)).cancelled():
                self._end(content_hash, PixelsFailure(_SHUTTING_DOWN))
        pending.leases.append(lease)
        return pending.future

    def put(
        self, content_hash: str, write: Callable[[str], tuple[int, int]], lease: PictureLease
    ) -> StoredPicture:
        """Stores a picture that this process decodes itself, unless it is stored: ``write`` makes the
        file."""
        found = self.find(content_hash, lease)
        if found is not None:
            return found
        size = self._written(path := self._new_path(), write)
        with self._lock:
            return self._keep(content_hash, size, path, [lease])

    def _make(self, content_hash: str, write: Callable[[str], tuple[int, int]]) -> None:
        with self._lock:
            pending = self._pending.get(content_hash)
            if pending is not None and not pending.is_wanted:
                self._end(content_hash, PixelsFailure("Its client has left."))
                return
        try:
            size = self._written(path := self._new_path(), write)
        except BaseException as error:
            with self._lock:
                if isinstance(error, PictureFault):
                    self._remember(content_hash, str(error))
                self._end(content_hash, error)
            return
        with self._lock:
            pending = self._pending.pop(content_hash)
            try:
                picture = self._keep(content_hash, size, path, pending.leases)
            except PixelsFailure as error:
                pending.future.set_exception(error)
            else:
                pending.future.set_result(picture)

    def _end(self, content_hash: str, error: BaseException) -> None:
        self._pending.pop(content_hash).future.set_exception(error)

    def _written(self, path: str, write: Callable[[str], tuple[int, int]]) -> tuple[int, int]:
        """Writes the file; if that fails, evicts all idle pictures and retries once."""
        try:
            return write(path)
        except (PixelsFailure, OSError):
            if not self.clear():
                raise
            return write(path)

    def _keep(
        self, content_hash: str, size: tuple[int, int], path: str, leases: list[PictureLease | None]
    ) -> StoredPicture:
        self._num_decoded += 1
        picture = StoredPicture(content_hash, *size, path)
        self._remember(content_hash, size)
        self._idle[content_hash] = picture
        self._idle_bytes += picture.num_bytes
        try:
            for lease in leases:
                if lease is not None:
                    self._hold(picture, lease)
        finally:
            self._evict()
        return picture

    def _remember(self, content_hash: str, known: tuple[int, int] | str) -> None:
        self._known[content_hash] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _hold(self, picture: StoredPicture, lease: PictureLease) -> None:
        if lease.is_released:
            return
        if not picture.num_holders:
            if self._held_bytes + picture.num_bytes > self._max_held_bytes:
                raise self._no_room()
            del self._idle[picture.content_hash]
            self._idle_bytes -= picture.num_bytes
            self._held[picture.content_hash] = picture
            self._held_bytes += picture.num_bytes
        picture.num_holders += 1
        lease.pictures.append(picture)

    def _no_room(self) -> PixelsFailure:
        return PixelsFailure(
            f"The pictures of running requests take {self._max_held_bytes / 2**30:.1f} GiB, the limit; "
            "try again when some have ended."
        )

    def release(self, lease: PictureLease) -> None:
        """Ends a lease; see ``PictureLease.release``."""
        with self._lock:
            lease.is_released = True
            for picture in lease.pictures:
                picture.num_holders -= 1
                if not picture.num_holders:
                    del self._held[picture.content_hash]
                    self._held_bytes -= picture.num_bytes
                    self._idle[picture.content_hash] = picture
                    self._idle_bytes += picture.num_bytes
            lease.pictures.clear()
            self._evict()

    def clear(self) -> bool:
        """Removes the pixels that no request holds; returns whether there were any."""
        with self._lock:
            found = bool(self._idle)
            self._evict(0)
            return found

    def _evict(self, max_bytes: int | None = None) -> None:
        limit = self._max_idle_bytes if max_bytes is None else max_bytes
        while self._idle_bytes > limit:
            _, picture = self._idle.popitem(last=False)
            self._idle_bytes -= picture.num_bytes
            if picture.path is not None:
                with suppress(OSError):
                    os.unlink(picture.path)

    def _new_path(self) -> str:
        with self._lock:
            if self._folder is None:
                self._folder = make_private_folder(_PREFIX, _place(self._usual_bytes))
                atexit.register(self.close)
            return os.path.join(self._folder, os.urandom(8).hex())

    def statistics(self) -> StoreStatistics:
        """The current counts."""
        with self._lock:
            return StoreStatistics(
                num_decoded=self._num_decoded,
                num_held=len(self._held),
                num_idle=len(self._idle),
                held_bytes=self._held_bytes,
                idle_bytes=self._idle_bytes,
            )

    def close(self) -> None:
        """Ends the decoding process, and removes all pixels. Repeatable."""
        self._decoder.close()
        self._thread.close(wait=True)
        with self._lock:
            folder = self._folder
            self._folder = None
            for content_hash in list(self._pending):
                self._end(content_hash, PixelsFailure(_SHUTTING_DOWN))
        if folder is not None:
            remove_private_folder(folder)
            atexit.unregister(self.close)


def _place(num_bytes: int) -> str | None:
    """The folder for files in memory; None, for the temporary folder, if it has less free space than this."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    has_room = found.f_bavail * found.f_frsize >= num_bytes
    return _SHARED_MEMORY if has_room and os.access(_SHARED_MEMORY, os.W_OK) else None


def _done(picture: StoredPicture) -> Future[StoredPicture]:
    future: Future[StoredPicture] = Future()
    future.set_result(picture)
    return future


def _failed(error: Exception) -> Future[StoredPicture]:
    future: Future[StoredPicture] = Future()
    future.set_exception(error)
    return future
