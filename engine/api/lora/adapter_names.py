"""Adapters by the names with which requests select them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.records.adapters import Adapter

_decoder = msgspec.json.Decoder(dict[str, Adapter])


class AdapterNames:
    """The adapters of one server; in a file that all its API server processes share, if there are several."""

    def __init__(self, modules: Mapping[str, Adapter], folder: Path | None) -> None:
        self._file = None if folder is None else folder / "adapters.json"
        self._known = dict(modules)
        self._modified = 0

    def all(self) -> Mapping[str, Adapter]:
        """All adapters by name."""
        if self._file is not None:
            try:
                modified = self._file.stat().st_mtime_ns
            except FileNotFoundError:  # nothing was changed yet
                return self._known
            if modified != self._modified:
                self._known = _decoder.decode(self._file.read_bytes())
                self._modified = modified
        return self._known

    def find(self, name: str) -> Adapter | None:
        return self.all().get(name)

    def put(self, adapter: Adapter) -> None:
        with self._changing() as known:
            known[adapter.name] = adapter

    def remove(self, name: str) -> None:
        with self._changing() as known:
            known.pop(name, None)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Adapter]]:
        if self._file is None:
            yield self._known
            return
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = dict(self.all())
            yield known
            written = self._file.with_suffix(".new")
            written.write_bytes(msgspec.json.encode(known))
            written.replace(self._file)
