"""LoRA adapters: their configuration, and how a request names its adapter."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.config_checks import at_least
from engine.errors import ConfigError, RequestError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
MAX_NAME_CHARS = 256
MAX_RANK = 512
MAX_CONFIG_BYTES = 2**20
_DIGEST_CHARS = 16
_READ_BYTES = 2**20


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter by its name and folder, with a digest of the folder's content."""

    name: str
    path: str
    digest: str

    @property
    def key(self) -> str:
        """Its name in block hashes and in the worker: other content under the same name is another
        adapter."""
        return f"{self.name}@{self.digest}"


def name_of(key: str | None) -> str | None:
    """The name of the adapter that has this key."""
    return None if key is None else key.rpartition("@")[0] or key


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for ``LLM.generate``, in V1's words; ``lora_int_id`` is not used."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters of one base model that run together."""

    modules: tuple[Adapter, ...] = ()
    """Adapters that are loaded at startup."""
    max_loras: int = 1
    """Most adapters of running requests; requests of further ones wait."""
    max_lora_rank: int = 16
    """Highest rank of an adapter."""
    max_cpu_loras: int | None = None
    """Most adapters in host memory; the least recently used is dropped, and read again when a request names
    it. None: no limit."""

    def __post_init__(self) -> None:
        at_least("max_loras", self.max_loras, 1)
        at_least("max_lora_rank", self.max_lora_rank, 1)
        if self.max_lora_rank > MAX_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MAX_RANK}, got {self.max_lora_rank}.")
        if self.max_cpu_loras is not None:
            at_least("max_cpu_loras", self.max_cpu_loras, self.max_loras)


def find_adapter(name: str, path: str) -> Adapter:
    """The adapter in a folder, all of which is read; RequestError if it is not valid, or the name is not."""
    if not 0 < len(name) <= MAX_NAME_CHARS or "@" in name or not name.isprintable():
        raise RequestError(
            f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters other than @.", "lora_name"
        )
    folder = Path(path)
    digest = sha256()
    for file_name, most_bytes in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, None)):
        try:
            with open_regular(folder / file_name, most_bytes) as content:
                while part := content.read(_READ_BYTES):
                    digest.update(part)
        except (OSError, ValueError) as error:
            raise RequestError(
                f"lora_path must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}: {file_name} of adapter "
                f"{name!r} cannot be read ({getattr(error, 'strerror', None) or error}).",
                "lora_path",
            ) from error
    return Adapter(name, str(folder.resolve()), _short(digest))


def digest_of(config: bytes, weights: bytes) -> str:
    """The digest of an adapter's two files."""
    digest = sha256(config)
    digest.update(weights)
    return _short(digest)


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:_DIGEST_CHARS])


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file, which neither blocks nor is endless; OSError or ValueError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    seen = os.fstat(descriptor)
    if not stat.S_ISREG(seen.st_mode):
        file.close()
        raise ValueError("it is not a regular file")
    if most_bytes is not None and seen.st_size > most_bytes:
        file.close()
        raise ValueError(f"it has {seen.st_size} bytes, and at most {most_bytes} are read")
    return file


def read_lora_config(
    *,
    enable_lora: bool = False,
    lora_modules: Sequence[str] | None = None,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    max_cpu_loras: int | None = None,
) -> LoRAConfig | None:
    """The record of V1's options; None if adapters are off. ConfigError if one of them is wrong, or needs
    ``enable_lora``. ``lora_modules``: ``NAME=PATH`` each."""
    given = {"max_loras": max_loras, "max_lora_rank": max_lora_rank, "max_cpu_loras": max_cpu_loras}
    options = {name: value for name, value in given.items() if value is not None}
    if not enable_lora:
        for name in ("lora_modules",) if lora_modules else options:
            raise ConfigError(f"{name} needs enable_lora.")
        return None
    modules = tuple(_configured(module) for module in lora_modules or ())
    if len({module.name for module in modules}) < len(modules):
        raise ConfigError("lora_modules: two adapters have the same name.")
    return LoRAConfig(modules=modules, **options)


def _configured(module: str) -> Adapter:
    name, equals, path = module.partition("=")
    if not equals or not path:
        raise ConfigError(f"lora_modules must be NAME=PATH, got {module!r}.")
    try:
        return find_adapter(name, path)
    except RequestError as error:
        raise ConfigError(f"lora_modules: {error}") from error
