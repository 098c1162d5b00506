"""The identity of a loaded model: a hash of every byte that was read, and of the options that change its KV.

Every key of KV that leaves the process contains it, so two models that share an architecture and most of
their tensors never use each other's KV. Reading all weights once more takes about a second per gigabyte, from
memory, so the digests of large files are saved, in the folder itself if it is writable.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.errors import ModelLoadError
from engine.worker.loading.model_folder import resolve_folder

FRONT_FILES = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files of a folder that define how prompts, pictures and audio become the model's inputs."""
KEPT = ".digests.json"
_READ_BYTES = 2**22
_LARGE_BYTES = 2**26
"""Smaller files are read again at each start, in a twentieth of a second, and their digests are not saved."""
_NUM_THREADS = 4
_RACY_S = 2.0
"""A file that was changed this recently may change again without a change of its time."""

Stamp = tuple[int, int, int, int]
"""Size, the times of the last change of content and of anything, in nanoseconds, and the inode number."""
Stamps = Mapping[Path, Stamp]


def stamps_of(config: EngineConfig, options: ModelConfig | None = None) -> Stamps:
    """The stamps of a model's files before it is loaded; ``options``: its options, if not the config's."""
    return {path: _stamp(path) for path in _files(config, options or config.model)}


def identity_of(config: EngineConfig, options: ModelConfig, before: Stamps) -> str:
    """The identity of a model that was loaded from files with the stamps ``before``. ModelLoadError if one of
    them was written to meanwhile."""
    if options.load_format == "dummy":
        before = {path: stamp for path, stamp in before.items() if path.suffix == ".json"}
    digests = _digests(list(before))
    after = {path: _stamp(path) for path in before}
    if changed := [path for path in before if before[path] != after[path]]:
        raise ModelLoadError(f"{changed[0]} was written to while the model was loaded; load it again.")
    digest = hashlib.sha256()
    said = options.dtype, options.quantization, options.load_format, options.seed, options.model_impl
    digest.update(repr((said, options.tokenizer, config.cache.kv_cache_scale)).encode())
    if not before:
        digest.update(options.model.encode())
    for path in sorted(before, key=lambda path: (path.parent != Path(options.model), path.name)):
        digest.update(f"{path.name} {digests[path]}\n".encode())
    return digest.hexdigest()[:32]


def _files(config: EngineConfig, options: ModelConfig) -> Iterator[Path]:
    folder = resolve_folder(options.model)
    front = folder if options.tokenizer is None else Path(options.tokenizer).expanduser()
    drafter = None if config.speculative is None else config.speculative.model
    yield from _there(folder / "config.json", *sorted(folder.glob("*.safetensors")))
    yield from _there(*(front / name for name in FRONT_FILES))
    if front != folder:
        yield from _there(*(folder / name for name in FRONT_FILES if "processor" in name))
    if drafter is not None:
        beside = resolve_folder(drafter)
        yield from _there(beside / "config.json", *sorted(beside.glob("*.safetensors")))


def _there(*paths: Path) -> Iterator[Path]:
    return (path for path in paths if path.is_file())


def _stamp(path: Path) -> Stamp:
    try:
        seen = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino


def _digests(paths: list[Path]) -> dict[Path, str]:
    """The digest of each file; saved digests are used for files that have not changed since."""
    kept = {folder: _kept(folder) for folder in {path.parent for path in paths}}
    found: dict[Path, str] = {}
    for path in paths:
        known = kept[path.parent].get(path.name)
        if known is not None and known[0] == list(_stamp(path)):
            found[path] = str(known[1])
    new = [path for path in paths if path not in found]
    if new:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            found |= dict(zip(new, threads.map(_digest, new), strict=True))
        for folder in {path.parent for path in new}:
            digests = {path.name: found[path] for path in paths if path.parent == folder}
            _keep(folder, digests)
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _cache_file(folder: Path) -> Path:
    """A file in the folder, or in the user's cache if the folder is not writable."""
    if os.access(folder, os.W_OK):
        return folder / KEPT
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return base / "continuum" / "digests" / f"{name}.json"


def _kept(folder: Path) -> dict[str, list[object]]:
    try:
        kept: object = json.loads(_cache_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {
        name: entry
        for name, entry in kept.items()
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)
    }


def _keep(folder: Path, digests: Mapping[str, str]) -> None:
    newest_ns = time.time_ns() - int(_RACY_S * 1e9)
    stamps = {name: _stamp(folder / name) for name in digests}
    lasting = {
        name: [list(stamps[name]), digest]
        for name, digest in digests.items()
        if stamps[name][0] >= _LARGE_BYTES and max(stamps[name][1], stamps[name][2]) < newest_ns
    }
    if lasting:
        file = _cache_file(folder)
        with suppress(OSError):  # then it is read again at the next start
            file.parent.mkdir(parents=True, exist_ok=True)
            written = file.with_name(f"{file.name}.{os.getpid()}")
            written.write_text(json.dumps(lasting), encoding="utf-8")
            os.replace(written, file)
