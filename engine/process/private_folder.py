"""Private temporary folders of a running server. A server that was killed leaves its folder behind; the next
one that starts on the machine removes it.

A running process holds a lock on a file in its folder; the system releases it when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_MARK, _UNFINISHED_MARK = ".in-use", ".begins"
_held: dict[str, int] = {}
"""Descriptors of the locks by folder: open while the process runs, unless the folder is removed."""


def make_private_folder(prefix: str, parent: str | None = None) -> str:
    """Make a folder that only this user can read, in ``parent`` or where temporary files are; removes those
    of this prefix there that were left behind."""
    _sweep(prefix, parent or tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    unfinished = os.path.join(folder, _UNFINISHED_MARK)
    descriptor = os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: no process sweeps there either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unfinished, os.path.join(folder, _MARK))  # seen by others from now on, and locked
    _held[folder] = descriptor
    return folder


def remove_private_folder(folder: str) -> None:
    """Remove the folder and its contents. May be called again."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_if_left(folder: str | Path) -> bool:
    """Remove the folder of another process if that has ended; returns whether it is gone."""
    mark = Path(folder) / _MARK
    with suppress(OSError):
        _remove_if_left(mark)
    return not mark.exists()


def _sweep(prefix: str, parent: str) -> None:
    for mark in Path(parent).glob(f"{prefix}*/{_MARK}"):
        with suppress(OSError):  # another user's, or removed meanwhile
            if mark.stat().st_uid == os.getuid() and not mark.parent.is_symlink():
                _remove_if_left(mark)


def _remove_if_left(mark: Path) -> None:
    descriptor = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        shutil.rmtree(mark.parent, ignore_errors=True)
    finally:
        os.close(descriptor)
