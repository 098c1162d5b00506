"""Writes the files of pixels and samples, which other processes read."""

from __future__ import annotations

import os
from contextlib import suppress


def write_new(data: bytes | memoryview, path: str) -> None:
    """Writes a new file that only this user reads; none is left if that fails."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
