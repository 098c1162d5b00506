"""The file that measuring commands leave (``--json``) and comparing ones read. Same runs, same bytes."""

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


class ResultFile(msgspec.Struct, kw_only=True):
    """Runs that one command made. It names no clock and no host: the same seed gives the same bytes."""

    schema_version: int = SCHEMA_VERSION
    title: str = ""
    command: str = ""
    """What makes it again."""
    notes: list[str] = []
    """What is measured and what is assumed, of all runs."""
    runs: list[RunResult] = []
    """Must stay the last field: it is written one run per line."""


class _Version(msgspec.Struct):
    """What every version of the file says of itself."""

    schema_version: int
    runs: list[msgspec.Raw]


def write_results(path: Path, results: ResultFile) -> None:
    """One line of head, then one line per run. The folder is made if need be.

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
    """Raises ``ResultError`` if one of these cannot be written; asked before a long run, not after it.

    Their folders are made; what the files hold stays. A pipe is not asked: that would end it.
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
    """Make it, if need be; asked before a long run. ``ResultError`` if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ResultError(f"Cannot write to {path}: not a folder.") from error
    except OSError as error:
        raise ResultError(f"Cannot write to {path}: {error.strerror}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ResultError(f"Cannot write to {path}: {os.strerror(errno.EACCES)}.")


def require_own_files(written: Sequence[Named], read: Sequence[Named] = ()) -> None:
    """Raises ``ResultError`` if two of these options name one file, of which something would be lost."""
    shared = shared_file(read, written)
    if shared is not None:
        raise ResultError(f"{shared}.")


def read_results(path: Path) -> ResultFile:
    """A result as ``--json`` wrote it.

    Raises ``ResultError``: the file is missing, cut, no result, or of another schema version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"Cannot read the result {path}: {error.strerror}.") from error
    _check_version(path, data)
    try:
        return msgspec.json.decode(data, type=ResultFile)
    except UNREADABLE as error:
        raise ResultError(f"{path} is not a whole result: {error}.") from error


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
