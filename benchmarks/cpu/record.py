"""The file of ``--json``: every value of every round, and the machine and versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

from benchmarks.cpu.match import Measured, Plan
from eval.errors import ResultError

SCHEMA_VERSION = 1


class FigureRecord(msgspec.Struct, kw_only=True):
    """One figure of one contender."""

    figure: str
    label: str
    less_is_better: bool
    values: list[float]
    """A value for each round."""


class ContenderRecord(msgspec.Struct, kw_only=True):
    name: str
    figures: list[FigureRecord]


class ModelRecord(msgspec.Struct, kw_only=True):
    """The results of one model."""

    model: str
    weight_bytes: int
    kv_bytes: int
    """Bytes of our KV pool."""
    contenders: list[ContenderRecord]
    failures: list[str]


class BenchRecord(msgspec.Struct, kw_only=True):
    """A run of the command."""

    schema_version: int = SCHEMA_VERSION
    command: str
    rounds: int
    seed: int
    num_cpus: int = os.cpu_count() or 1
    machine: str = platform.machine()
    python: str = platform.python_version()
    models: list[ModelRecord] = []


def record_of(model: str, weight_bytes: int, kv_bytes: int, measured: Measured) -> ModelRecord:
    contenders = [
        ContenderRecord(
            name=name,
            figures=[
                FigureRecord(
                    figure=figure.key,
                    label=figure.label.strip(),
                    less_is_better=figure.less_is_better,
                    values=values,
                )
                for figure, values in figures.items()
            ],
        )
        for name, figures in measured.readings.items()
    ]
    return ModelRecord(
        model=model,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        contenders=contenders,
        failures=measured.failures,
    )


def begin_record(plan: Plan, command: str) -> BenchRecord:
    return BenchRecord(command=command, rounds=plan.num_rounds, seed=plan.seed)


def write_record(path: Path, record: BenchRecord) -> None:
    """Writes the file; raises ResultError if that fails."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        raise ResultError(f"Cannot write the result {path}: {error.strerror}.") from error
