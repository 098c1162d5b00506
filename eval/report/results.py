"""The result file that measuring commands write (``--json``) and comparing ones read. Deterministic."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eval.errors import UNREADABLE, ResultError
from eval.report.metrics import RunResult
from tracing.own_file import Named, shared_file

SCHEMA_VERSION = 1
_RENAMED = {"broken": "revoked"}
"""Names of pin ends in older files of this version, and their present names."""


class ResultFile(msgspec.Struct, kw_only=True):
    """The runs of one command. It has no time of day and no host: the same seed gives the same bytes."""

    schema_version: int = SCHEMA_VERSION
    title: str = ""
    command: str = ""
    """The command that reproduces it."""
    notes: list[str] = []
    """Which figures of all runs are measured and which assumed."""
    runs: list[RunResult] = []
    """The runs, one per line. This must stay the last field."""


class _Version(msgspec.Struct):
    """The fields that every version of the file has."""

    schema_version: int
    runs: list[msgspec.Raw]


def write_results(path: Path, results: ResultFile) -> None:
    """Writes a header line, then one line per run. Creates the folder if needed.

    Raises ``ResultError`` if the file cannot be written.
    """
    encoder = msgspec.json.Encoder(order="deterministic")
    head = encoder.encode(msgspec.structs.replace(results, runs=[])).removesuffix(b"]}")
    lines = b",\n".join(encoder.encode(run) for run in results.runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(head + b"\n" + lines + b"\n]}\n")
    except OSError as error:
        raise ResultError(f"Cannot write the result {path}: {error.strerror}.") from error


def require_writable(*paths: Path | None) -> None:
    """Raises ``ResultError`` if one of these cannot be written; called before a long run.

    Creates their folders and leaves existing files as they are. Pipes are not opened, which would end them.
    """
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            if is_new or path.is_file() or path.is_dir():
                path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise ResultError(f"Cannot write the result {path}: {error.strerror}.") from error


def require_folder(path: Path) -> None:
    """Creates the folder if needed, before a long run. ``ResultError`` if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ResultError(f"Cannot write to {path}: not a folder.") from error
    except OSError as error:
        raise ResultError(f"Cannot write to {path}: {error.strerror}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ResultError(f"Cannot write to {path}: {os.strerror(errno.EACCES)}.")


def require_own_files(written: Sequence[Named], read: Sequence[Named] = ()) -> None:
    """Raises ``ResultError`` if two of these options name one file, which would be overwritten."""
    shared = shared_file(read, written)
    if shared is not None:
        raise ResultError(f"{shared}.")


def read_results(path: Path) -> ResultFile:
    """Reads a result that ``--json`` wrote.

    Raises ``ResultError`` if the file is missing, cut, not a result, or of another schema version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"Cannot read the result {path}: {error.strerror}.") from error
    _check_version(path, data)
    try:
        results = msgspec.json.decode(data, type=ResultFile)
    except UNREADABLE as error:
        raise ResultError(f"{path} is not a complete result: {error}.") from error
    for run in results.runs:
        run.pins_ended = {_RENAMED.get(cause, cause): count for cause, count in run.pins_ended.items()}
    return results


def _check_version(path: Path, data: bytes) -> None:
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
    except msgspec.ValidationError as error:
        raise ResultError(f"{path} is not a result of `--json`: {error}.") from error
    except UNREADABLE as error:
        raise ResultError(f"{path} is cut short or not JSON: {error}.") from error
    if version != SCHEMA_VERSION:
        raise ResultError(
            f"{path} has schema version {version}, but this program reads {SCHEMA_VERSION}: "
            "run the command that made it again."
        )
