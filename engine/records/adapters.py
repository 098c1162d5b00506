"""LoRA adapters: how a request names its adapter, and what its folder holds."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.errors import RequestError

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
