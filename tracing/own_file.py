"""Checks that the options of a command name different files, so that no input and no result is overwritten.

It does not know the contents of the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracing.parts import split_part, traces_in

Named = tuple[str, Path | None]
"""An option as it is typed, and the path that was given for it."""


def shared_file(read: Sequence[Named], written: Sequence[Named]) -> str | None:
    """A sentence about two options that name the same file, if something would be lost; else None.

    A path without contents to lose, such as a pipe or /dev/null, may be named any number of times.
    """
    inputs = [(option, file) for option, path in read if path is not None for file in _files_of(path)]
    outputs = [(option, path) for option, path in written if path is not None and _has_content(path)]
    for place, (option, path) in enumerate(outputs):
        for other, file in inputs:
            if _is_same(path, file):
                return f"{other} and {option} are the same file, {path}: it would be overwritten"
        for other, file in outputs[:place]:
            if _is_same(path, file):
                return f"{other} and {option} are the same file, {path}: one result would be lost"
    return None


def _files_of(path: Path) -> Iterator[Path]:
    """Yield the file or, for a folder, the traces in it."""
    if os.path.isdir(path):
        yield from traces_in(path)
    elif _has_content(path):
        yield path


def _has_content(path: Path) -> bool:
    """Whether the path is a file or a folder, or may become one."""
    return os.path.isfile(path) or os.path.isdir(path) or not os.path.exists(path)


def _is_same(a: Path, b: Path) -> bool:
    """Whether two paths lead to the same file. Parts of one trace count as the same, since writing the first
    removes the others."""
    if _whole(a) == _whole(b):
        return True
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def _whole(path: Path) -> Path:
    return split_part(Path(os.path.realpath(path)))[0]
