"""Stores pictures and clips as the model reads them, by the hash of their files: the next turn of a job sends
the same ones again.

There is one store per API server process. Pixels and samples are in files in memory, which the core reads.
Those that a request holds are kept; of the others, the least recently used are evicted.
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

from engine.media.decoder import MediaDecoder
from engine.media.limits import MediaFailure, MediaFault
from engine.process.fair_threads import FairThreads
from engine.process.private_folder import make_private_folder, remove_private_folder
from engine.records.media import MediaKind, MediaModels, MediaSize

_SHUTTING_DOWN = "The server is shutting down."
MAX_KNOWN = 16384
"""Maximum number of files whose size or fault is remembered."""
MIN_HELD_BYTES = 4 * 2**30
"""Requests may by default hold ``max_idle_bytes`` together, but at least this many."""

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "continuum-media-"


@dataclass(slots=True, eq=False)
class StoredMedia:
    """A picture or clip as the model reads it."""

    content_hash: str
    size: MediaSize
    path: str | None
    """The file of its pixels or samples; None if only the size was requested."""
    num_holders: int = 0

    @property
    def kind(self) -> MediaKind:
        return self.size.kind

    @property
    def num_bytes(self) -> int:
        return self.size.num_bytes


class MediaLease:
    """The media that one request holds, until it is released."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self.held: list[StoredMedia] = []
        self.is_released = False

    def release(self) -> None:
        """Releases the media of an ended request, also those that are still being decoded. Repeatable."""
        self._store.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class _Pending:
    """A file that is being decoded, and the leases that wait for it."""

    future: Future[StoredMedia] = field(default_factory=Future)
    leases: list[MediaLease | None] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether any request still waits: one that has ended has released its lease."""
        return any(lease is None or not lease.is_released for lease in self.leases)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the store holds, and how many files it had to decode."""

    num_decoded: int
    num_held: int
    num_idle: int
    held_bytes: int
    idle_bytes: int


class MediaStore:
    """Starts and creates nothing before the first file. Thread safe."""

    def __init__(self, models: MediaModels, max_idle_bytes: int, max_held_bytes: int | None = None) -> None:
        """``max_held_bytes``: maximum bytes that requests hold together; by default ``max_idle_bytes``, but
        at least MIN_HELD_BYTES."""
        self.on_lookup: Callable[[bool], object] = lambda found: None
        """Called for each file that a request will hold, with whether it was already stored."""
        self._models = models
        self._max_idle_bytes = max_idle_bytes
        self._usual_bytes = max(max_idle_bytes, MIN_HELD_BYTES)
        self._max_held_bytes = self._usual_bytes if max_held_bytes is None else max_held_bytes
        self._decoders = {kind: MediaDecoder(model) for kind, model in models.all.items()}
        self._threads = {kind: FairThreads(1, f"{kind}-decoder") for kind in models.all}
        """A thread for each process, which decodes one file at a time."""
        self._lock = Lock()
        self._folder: str | None = None
        self._num_decoded = 0
        self._held: dict[str, StoredMedia] = {}
        self._idle: OrderedDict[str, StoredMedia] = OrderedDict()
        self._held_bytes = self._idle_bytes = 0
        self._pending: dict[str, _Pending] = {}
        self._known: OrderedDict[str, MediaSize | str] = OrderedDict()
        """The size of a picture or clip, or what is wrong with it, by its hash."""

    def hash_of(self, data: bytes, kind: MediaKind, owner: str | None) -> str:
        """A hash of the file's content, of the owner, so that timing does not reveal what others have sent,
        and of the kind's settings, on which pixels and samples depend."""
        model = self._models.of(kind)
        assert model is not None, "nobody asks for other kinds"
        digest = sha256(data)
        digest.update(msgspec.json.encode((kind, *model.settings, owner)))
        return digest.hexdigest()

    def lease(self) -> MediaLease:
        """Returns an empty lease."""
        return MediaLease(self)

    def find(self, content_hash: str, lease: MediaLease | None) -> StoredMedia | None:
        """Returns a stored file, held by the lease; None if it must be decoded. Without a lease, returns
        only its size. MediaFault if decoding has failed before."""
        with self._lock:
            found = self._find(content_hash, lease)
        if found is not None and lease is not None:
            self.on_lookup(True)
        return found

    def _find(self, content_hash: str, lease: MediaLease | None) -> StoredMedia | None:
        known = self._known.get(content_hash)
        if known is not None:
            self._known.move_to_end(content_hash)
        if isinstance(known, str):
            raise MediaFault(known)
        if lease is None:
            return None if known is None else StoredMedia(content_hash, known, None)
        stored = self._held.get(content_hash) or self._idle.get(content_hash)
        if stored is not None:
            self._hold(stored, lease)
        return stored

    def get(
        self,
        content_hash: str,
        data: bytes,
        kind: MediaKind,
        lease: MediaLease | None,
        owner: str | None = None,
    ) -> Future[StoredMedia]:
        """Returns the picture or clip of a file, decoding it if it is not stored; concurrent callers share
        one decoding. Owners take turns.

        The future may raise MediaFault or MediaFailure. It is shared and cannot be cancelled; a file is not
        decoded if no request waits for it at its turn.
        """
        with self._lock:
            known = content_hash in self._known
            future = self._get(content_hash, data, kind, lease, owner or "")
        if lease is not None:
            self.on_lookup(known and future.done())
        return future

    def _get(
        self, content_hash: str, data: bytes, kind: MediaKind, lease: MediaLease | None, owner: str
    ) -> Future[StoredMedia]:
        try:
            if (stored := self._find(content_hash, lease)) is not None:
                return _done(stored)
        except (MediaFault, MediaFailure) as error:
            return _failed(error)
        pending = self._pending.get(content_hash)
        if pending is None:
            if self._held_bytes >= self._max_held_bytes:
                return _failed(self._no_room())
            pending = self._pending[content_hash] = _Pending()
            pending.future.set_running_or_notify_cancel()
            write = partial(self._decoders[kind].decode, data)
            if self._threads[kind].submit(owner, partial(self._make, content_hash, write)).cancelled():
                self._end(content_hash, MediaFailure(_SHUTTING_DOWN))
        pending.leases.append(lease)
        return pending.future

    def put(self, content_hash: str, write: Callable[[str], MediaSize], lease: MediaLease) -> StoredMedia:
        """Stores a file that this process decodes itself, unless it is stored: ``write`` makes the
        file."""
        found = self.find(content_hash, lease)
        if found is not None:
            return found
        size = self._written(path := self._new_path(), write)
        with self._lock:
            return self._keep(content_hash, size, path, [lease])

    def _make(self, content_hash: str, write: Callable[[str], MediaSize]) -> None:
        with self._lock:
            pending = self._pending.get(content_hash)
            if pending is not None and not pending.is_wanted:
                self._end(content_hash, MediaFailure("Its client has left."))
                return
        try:
            size = self._written(path := self._new_path(), write)
        except BaseException as error:
            with self._lock:
                if isinstance(error, MediaFault):
                    self._remember(content_hash, str(error))
                self._end(content_hash, error)
            return
        with self._lock:
            pending = self._pending.pop(content_hash)
            try:
                stored = self._keep(content_hash, size, path, pending.leases)
            except MediaFailure as error:
                pending.future.set_exception(error)
            else:
                pending.future.set_result(stored)

    def _end(self, content_hash: str, error: BaseException) -> None:
        self._pending.pop(content_hash).future.set_exception(error)

    def _written(self, path: str, write: Callable[[str], MediaSize]) -> MediaSize:
        """Writes the file; if that fails, evicts all idle ones and retries once."""
        try:
            return write(path)
        except (MediaFailure, OSError):
            if not self.clear():
                raise
            return write(path)

    def _keep(
        self, content_hash: str, size: MediaSize, path: str, leases: list[MediaLease | None]
    ) -> StoredMedia:
        self._num_decoded += 1
        stored = StoredMedia(content_hash, size, path)
        self._remember(content_hash, size)
        self._idle[content_hash] = stored
        self._idle_bytes += stored.num_bytes
        try:
            for lease in leases:
                if lease is not None:
                    self._hold(stored, lease)
        finally:
            self._evict()
        return stored

    def _remember(self, content_hash: str, known: MediaSize | str) -> None:
        self._known[content_hash] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _hold(self, stored: StoredMedia, lease: MediaLease) -> None:
        if lease.is_released:
            return
        if not stored.num_holders:
            if self._held_bytes + stored.num_bytes > self._max_held_bytes:
                raise self._no_room()
            del self._idle[stored.content_hash]
            self._idle_bytes -= stored.num_bytes
            self._held[stored.content_hash] = stored
            self._held_bytes += stored.num_bytes
        stored.num_holders += 1
        lease.held.append(stored)

    def _no_room(self) -> MediaFailure:
        return MediaFailure(
            f"Pictures and clips of running requests take {self._max_held_bytes / 2**30:.1f} GiB, the limit; "
            "try again when some have ended."
        )

    def release(self, lease: MediaLease) -> None:
        """Ends a lease; see ``MediaLease.release``."""
        with self._lock:
            lease.is_released = True
            for stored in lease.held:
                stored.num_holders -= 1
                if not stored.num_holders:
                    del self._held[stored.content_hash]
                    self._held_bytes -= stored.num_bytes
                    self._idle[stored.content_hash] = stored
                    self._idle_bytes += stored.num_bytes
            lease.held.clear()
            self._evict()

    def clear(self) -> bool:
        """Removes the files that no request holds; returns whether there were any."""
        with self._lock:
            found = bool(self._idle)
            self._evict(0)
            return found

    def _evict(self, max_bytes: int | None = None) -> None:
        limit = self._max_idle_bytes if max_bytes is None else max_bytes
        while self._idle_bytes > limit:
            _, stored = self._idle.popitem(last=False)
            self._idle_bytes -= stored.num_bytes
            if stored.path is not None:
                with suppress(OSError):
                    os.unlink(stored.path)

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
        """Ends the decoding processes, and removes all files. Repeatable."""
        for decoder in self._decoders.values():
            decoder.close()
        for thread in self._threads.values():
            thread.close(wait=True)
        with self._lock:
            folder = self._folder
            self._folder = None
            for content_hash in list(self._pending):
                self._end(content_hash, MediaFailure(_SHUTTING_DOWN))
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


def _done(stored: StoredMedia) -> Future[StoredMedia]:
    future: Future[StoredMedia] = Future()
    future.set_result(stored)
    return future


def _failed(error: Exception) -> Future[StoredMedia]:
    future: Future[StoredMedia] = Future()
    future.set_exception(error)
    return future
