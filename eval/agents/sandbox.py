"""A folder for tools: a temporary copy, and no path that leads out of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MAX_PATH_CHARACTERS = 512
MAX_COPY_BYTES = 64 * 2**20
"""Limit on the total size of a folder, which is copied before anything runs."""


class Refused(Exception):
    """A call is refused; the text of the error goes to the model."""


class Sandbox:
    """Resolves the paths of tool calls below ``root``, including symbolic links."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, given: str) -> Path:
        """Returns the resolved path of a call; ``Refused`` if it is outside the folder or not valid."""
        if len(given) > MAX_PATH_CHARACTERS:
            raise Refused(f"the path is longer than {MAX_PATH_CHARACTERS} characters")
        if "\0" in given:
            raise Refused("a path cannot contain a null character")
        try:
            path = (self.root / given).resolve()
        except (OSError, RuntimeError) as error:  # a loop of links
            raise Refused(f"{given} cannot be resolved") from error
        if path != self.root and self.root not in path.parents:
            raise Refused(f"{given} is outside the folder")
        return path

    def name(self, path: Path) -> str:
        """Returns a path as the model sees it, relative to the root."""
        return path.relative_to(self.root).as_posix()


@contextmanager
def folder_of(files: Mapping[str, str]) -> Iterator[Path]:
    """Makes a temporary folder with these files (path to content), deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        for path, content in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        yield Path(folder)


@contextmanager
def copy_of(folder: Path, max_bytes: int = MAX_COPY_BYTES) -> Iterator[Path]:
    """Makes a temporary copy of a folder, deleted afterwards; ``Refused`` if it is larger than ``max_bytes``.

    Links are copied as links, so one that leads out of the folder leads out of the sandbox too.
    """
    num_bytes = 0
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            num_bytes += file.stat().st_size
        if num_bytes > max_bytes:
            raise Refused(f"{folder} holds more than {max_bytes // 2**20} MiB; choose a smaller folder")
    with tempfile.TemporaryDirectory(prefix="agent-") as copy:
        shutil.copytree(folder, Path(copy, "folder"), symlinks=True)
        yield Path(copy, "folder")
