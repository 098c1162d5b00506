"""Writes records as turns end, so that a killed run keeps its records and can be resumed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from eval.errors import ResultError
from eval.load.records import JobRecord, Record, Recording, RunHeader, TurnRecord, read_records


class Journal:
    """A growing file of records; without a path, nothing is written. Use it as a context manager."""

    def __init__(self, path: Path | None, header: RunHeader, kept: Recording | None = None) -> None:
        """Begins a new file: the header, then the records ``kept`` from an earlier part of the same run."""
        self.broken: str | None = None
        """Why writing stopped although the run continues."""
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = None
        if path is not None:
            self._begin(path, [header, *(kept.turns if kept else ()), *(kept.jobs if kept else ())])

    def _begin(self, path: Path, records: list[Record]) -> None:
        fresh = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The old file stays intact until the new one is complete.
            self._file = fresh.open("wb")
            for record in records:
                self._write(self._file, record)
            os.replace(fresh, path)
        except OSError as error:
            self._close()
            with suppress(OSError):
                fresh.unlink()
            raise ResultError(f"Cannot write the records {path}: {error.strerror}.") from error

    def add(self, record: Record) -> None:
        """Writes one record and flushes it. A full disk ends the records, not the run."""
        if self._file is None:
            return
        try:
            self._write(self._file, record)
        except OSError as error:
            self.broken = f"the records end early: {error.strerror}"
            self._close()

    def _write(self, file: IO[bytes], record: Record) -> None:
        file.write(self._encoder.encode(record) + b"\n")
        file.flush()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could be written is written
                self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def resumable(path: Path, header: RunHeader) -> Recording:
    """The ended jobs of a run, with their turns, which a resumed run under this header need not repeat.

    Sub-agents belong to the job that started them. Raises ResultError if the file is of another run.
    """
    found = read_records(path)
    if found.header is None:
        raise ResultError(f"{path} does not name its run; only records of `bench` can be resumed.")
    _check_same_run(path, found.header.settings, header.settings)
    ended = {job.job_id: job for job in found.jobs if job.error is None}
    kept = [job for job in ended.values() if _root(job, ended) is not None]
    names = {job.job_id for job in kept}
    return Recording(
        found.header, [turn for turn in found.turns if turn.job_id in names], kept, found.was_cut
    )


def _root(job: JobRecord, ended: dict[str, JobRecord]) -> JobRecord | None:
    """Returns the root of this sub-agent's job; None if it or a job in between has not ended."""
    while job.parent_job is not None:
        parent = ended.get(job.parent_job)
        if parent is None:
            return None
        job = parent
    return job


def _check_same_run(path: Path, before: dict[str, str], now: dict[str, str]) -> None:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ResultError(
                f"{path} is of another run and cannot be resumed: "
                f"{name} was {before.get(name, 'not set')} and is {now.get(name, 'not set')}."
            )


def last_moment_s(kept: Recording) -> float:
    """The time at which the kept part of a run ended."""
    turns: list[TurnRecord] = kept.turns
    return max([0.0, *(job.end_s for job in kept.jobs), *(turn.start_s + turn.latency_s for turn in turns)])
