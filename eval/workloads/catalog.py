"""Chooses the jobs of a run by name: a file of any known format, or a kind of synthetic jobs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Protocol

import msgspec

from eval.errors import UNREADABLE, WorkloadError
from eval.workloads.aiperf import read_aiperf
from eval.workloads.bench_records import read_bench_records
from eval.workloads.chats import read_openai_chats, read_sharegpt
from eval.workloads.eight_turns import EIGHT_TURNS, EightTurnWorkload
from eval.workloads.families import families, roots
from eval.workloads.job import Job
from eval.workloads.jsonl import Place, in_words, read_bytes
from eval.workloads.mooncake import read_mooncake
from eval.workloads.provenance import describe
from eval.workloads.published import JobMaker, Preset, parse_preset
from eval.workloads.recorded import read_recorded
from eval.workloads.sampling import NO_LIMITS, JobLimits, Sample, draw, limited, nothing_left
from eval.workloads.scheduler_trace import read_scheduler_trace
from eval.workloads.synthetic import SyntheticConfig, make_jobs

__all__ = ["SYNTHETIC", "Workload", "describe", "load_jobs", "open_workload", "short_name"]

SYNTHETIC = "synthetic"
PLUS = "+"
"""Separates the parts of a mix."""
NUM_SYNTHETIC_JOBS = 8
NUM_PUBLISHED_JOBS = 100
MAX_TRIES = 100
"""Most synthetic jobs tried per requested job, before the limits count as leaving none."""

Reader = Callable[[Path], tuple[list[Job], list[str]]]


class Workload(Protocol):
    """Jobs to choose from."""

    @property
    def name(self) -> str:
        """Name by which the workload was requested."""

    @property
    def notes(self) -> list[str]:
        """Notes from reading it."""

    def sample(self, num_jobs: int | None, seed: int | None, limits: JobLimits = NO_LIMITS) -> Sample:
        """Returns jobs within limits: ``num_jobs`` roots (a default number, if None) with their sub-agents.

        With a seed they are drawn or made at random, without one in the order of the file. WorkloadError if
        none is left.
        """


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """All jobs of a file."""

    name: str
    jobs: tuple[Job, ...]
    notes: list[str] = field(default_factory=list)

    def sample(self, num_jobs: int | None, seed: int | None, limits: JobLimits = NO_LIMITS) -> Sample:
        within = limited(self.jobs, limits)
        if not within.jobs:
            raise nothing_left(f"no job of {self.name}", within.notes)
        drawn = draw(within.jobs, num_jobs, seed)
        return Sample(drawn.jobs, [*self.notes, *within.notes, *drawn.notes])


@dataclass(frozen=True, slots=True)
class PresetWorkload:
    """Synthetic jobs matched to published moments, as many as requested."""

    preset: Preset
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.preset.title

    def sample(self, num_jobs: int | None, seed: int | None, limits: JobLimits = NO_LIMITS) -> Sample:
        wanted = num_jobs or NUM_PUBLISHED_JOBS
        maker = JobMaker(self.preset, seed or 0)
        kept: list[Job] = []
        tried: list[Job] = []
        for index in islice(count(), wanted * MAX_TRIES):
            tried.append(maker.make(index))
            kept.extend(limited(tried[-1:], limits).jobs)
            if len(kept) == wanted:
                return Sample(kept, limited(tried, limits).notes)
        raise nothing_left(
            f"only {len(kept)} of {len(tried)} jobs of {self.name}", limited(tried, limits).notes
        )


@dataclass(frozen=True, slots=True)
class TextWorkload:
    """Synthetic jobs with texts, for live models."""

    name: str = SYNTHETIC
    notes: list[str] = field(default_factory=list)

    def sample(self, num_jobs: int | None, seed: int | None, limits: JobLimits = NO_LIMITS) -> Sample:
        config = SyntheticConfig(num_jobs=num_jobs or NUM_SYNTHETIC_JOBS, seed=seed or 0)
        within = limited(make_jobs(config), limits)
        if not within.jobs:
            raise nothing_left(f"no job of {self.name}", within.notes)
        return within


@dataclass(frozen=True, slots=True)
class MixedWorkload:
    """Jobs of several workloads, equally many of each, in an order drawn by the seed."""

    name: str
    parts: tuple[Workload, ...]

    @property
    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes]

    def sample(self, num_jobs: int | None, seed: int | None, limits: JobLimits = NO_LIMITS) -> Sample:
        """Draws an equal share of each part; a remainder goes to the first parts, one job each.

        Without ``num_jobs`` each part gives its default number. WorkloadError if two jobs have the same id.
        """
        mixed: list[list[Job]] = []
        notes: list[str] = []
        for part, share in zip(self.parts, self._shares(num_jobs), strict=True):
            if share == 0:
                continue
            drawn = part.sample(share, seed, limits)
            mixed += families(drawn.jobs)
            notes += [f"{short_name(part.name)}: {note}" for note in drawn.notes]
        random.Random(f"mix {seed}").shuffle(mixed)
        jobs = [job for family in mixed for job in family]
        self._check_ids(jobs)
        return Sample(jobs, notes)

    def _shares(self, num_jobs: int | None) -> list[int | None]:
        if num_jobs is None:
            return [None] * len(self.parts)
        even, left = divmod(num_jobs, len(self.parts))
        return [even + (place < left) for place in range(len(self.parts))]

    def _check_ids(self, jobs: Sequence[Job]) -> None:
        seen: set[str] = set()
        for job in jobs:
            if job.job_id in seen:
                raise WorkloadError(f"The workload {self.name} has two jobs of the id {job.job_id}.")
            seen.add(job.job_id)


def open_workload(name: str) -> Workload:
    """Opens a file by its path, ``synthetic``, ``eight-turns``, or a preset (``swe-bench``, ``bfcl:turns=2``,
    ``openhands``).

    ``A+B+C`` is a mix of those, unless there is a file with that name. WorkloadError if a file cannot be
    read, has no jobs, or is invalid somewhere: it names the line.
    """
    parts = _parts(name)
    if len(parts) > 1:
        return MixedWorkload(name, tuple(open_workload(part) for part in parts))
    if name == SYNTHETIC:
        return TextWorkload()
    if name == EIGHT_TURNS:
        return EightTurnWorkload()
    preset = parse_preset(name)
    if preset is not None:
        return PresetWorkload(preset)
    path = Path(name)
    jobs, notes = _reader_of(path)(path)
    if not jobs:
        raise WorkloadError(f"The workload {name} holds no jobs{''.join(f'; {note}' for note in notes)}.")
    return RecordedWorkload(name, tuple(jobs), notes)


def files_of(option: str, name: str) -> list[tuple[str, Path]]:
    """Returns the files of a workload, each with the option that names it."""
    return [(option, Path(part)) for part in (name, *name.split(PLUS)) if os.path.isfile(part)]


def short_name(name: str) -> str:
    """Returns a name that does not depend on folders: the file name, for each part of a mix."""
    return PLUS.join(Path(part).name for part in _parts(name))


def _parts(name: str) -> list[str]:
    """Returns the parts of a mix; only the name itself if there is a file with that name or nothing is mixed.

    Raises WorkloadError if a part is missing.
    """
    if PLUS not in name or Path(name).exists():
        return [name]
    parts = name.split(PLUS)
    if "" in parts:
        raise WorkloadError(f"The workload {name} has nothing on one side of a {PLUS!r}.")
    return parts


def load_jobs(workload: str, num_jobs: int | None, seed: int | None) -> list[Job]:
    """``num_jobs`` jobs of a workload (default: all) with their sub-agents; with a seed, drawn at random.

    Raises WorkloadError if there are fewer.
    """
    opened = open_workload(workload)
    if isinstance(opened, RecordedWorkload) and num_jobs is not None:
        held = len(roots(opened.jobs))
        if num_jobs > held:
            raise WorkloadError(f"--jobs asks for {num_jobs} jobs, but {workload} holds {held}.")
    return opened.sample(num_jobs, seed).jobs


def _reader_of(path: Path) -> Reader:
    """Returns the reader for a file, by the form of its first record."""
    content = read_bytes(path, partial=True).lstrip()
    if not content:
        return read_recorded
    is_list = content.startswith(b"[")
    try:
        first = _first_of(content) if is_list else content.partition(b"\n")[0]
        record = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise Place(path, 1).error(f"neither JSON lines nor a JSON list: {in_words(error)}") from error
    reader = _reader_by(record)
    if is_list and reader in ONE_A_LINE:
        raise Place(path).error(f"a JSON list of {ONE_A_LINE[reader]}, but each must be on its own line")
    if reader is None:
        raise Place(path, 1).error(
            f"of no known format: a record of {', '.join(record) or 'nothing'}; known are recorded jobs, "
            "Mooncake, aiperf sessions, ShareGPT, OpenAI chats, scheduler traces and bench records"
        )
    return reader


def _first_of(content: bytes) -> bytes | msgspec.Raw:
    entries = msgspec.json.decode(content, type=list[msgspec.Raw])
    return entries[0] if entries else b'{"messages": []}'


ONE_A_LINE: dict[Reader | None, str] = {
    read_scheduler_trace: "the events of a trace",
    read_bench_records: "the records of a run",
}
"""Formats that are never one JSON list."""


def _reader_by(record: Mapping[str, msgspec.Raw]) -> Reader | None:
    if bytes(record.get("type", b"")) == b'"header"':
        return read_scheduler_trace
    if "conversations" in record:
        return read_sharegpt
    if "messages" in record:
        return read_openai_chats
    if "kind" in record:
        return read_bench_records
    if "job_id" in record:
        return read_recorded
    if "turns" in record:
        return read_recorded if b'"input_tokens"' in bytes(record["turns"]) else read_aiperf
    return read_mooncake if "input_length" in record else None
