"""Private temporary folders of a running server. A server that was killed leaves its folder; the next server
that starts on the machine removes it.

A running process holds a lock on a file in its folder; the system releases it when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_MARK = ".in-use"
_UNFINISHED_MARK = ".begins"
_held: dict[str, int] = {}
"""The descriptor of the lock by folder: open until the process ends or the folder is removed."""


def make_private_folder(prefix: str, parent: str | None = None) -> str:
    """Makes a folder that only this user can read, in ``parent`` or the temporary folder; removes folders of
    ended processes with this prefix there."""
    _sweep(prefix, parent or tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    unfinished = os.path.join(folder, _UNFINISHED_MARK)
    descriptor = os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: no process removes folders there
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unfinished, os.path.join(folder, _MARK))  # from now on, others see it, locked
    _held[folder] = descriptor
    return folder


def remove_private_folder(folder: str) -> None:
    """Removes the folder and its contents. Repeatable."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_if_left(folder: str | Path) -> bool:
    """Removes the folder of another process if that has ended; returns whether the folder is gone."""
    mark = Path(folder) / _MARK
    with suppress(OSError):
        _remove_if_left(mark)
    return not mark.exists()


def _sweep(prefix: str, parent: str) -> None:
    for mark in Path(parent).glob(f"{prefix}*/{_MARK}"):
        with suppress(OSError):  # it belongs to another user, or was removed meanwhile
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
