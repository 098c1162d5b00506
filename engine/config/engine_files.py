"""Names of the files that each of several engine cores has separately."""

from __future__ import annotations

from pathlib import Path


def path_of_engine(path: str | None, index: int) -> str | None:
    """The path for a core: the first one's is ``path``, the others' have a number, as ``kv.engine1``."""
    if path is None or index == 0:
        return path
    named = Path(path)
    stem, dot, endings = named.name.partition(".")
    return str(named.with_name(f"{stem}.engine{index}{dot}{endings}"))
