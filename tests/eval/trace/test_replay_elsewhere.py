"""A trace of one machine replays on another: no decision depends on a library's floats."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from continuum.cli.main import main
from engine.process.machine import describe_machine
from tests.eval.trace.kept_trace import KEPT
from tests.eval.trace.plain_process import BY_LIBRARY
from tracing.events import PinEvent, TraceHeader
from tracing.reader import read_trace

REPOSITORY = Path(__file__).resolve().parents[3]
ANOTHER_CPU = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
}
"""Other kernels of BLAS, of numpy, and of the C library's ``exp`` and ``log``."""
WRITE_ANEW = "if the policy was changed on purpose: python -m tests.eval.trace.kept_trace"


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_kept_trace_is_decided_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The trace was written by an earlier version, on the machine that its header names."""
    assert main(["trace", "replay", str(KEPT)]) == 0, capsys.readouterr().out + WRITE_ANEW
    assert "no difference" in capsys.readouterr().out


@pytest.mark.slow
def test_another_cpu_decides_the_same() -> None:
    """Another CPU is imitated as far as libraries allow."""
    assert "no difference" in _run("-m", "continuum.cli", "trace", "replay", str(KEPT), **ANOTHER_CPU)


@pytest.mark.slow
def test_no_numpy_and_no_mathematical_library_is_needed() -> None:
    """Other versions of numpy, of the C library or of Python give the same decisions."""
    assert "no difference" in _run("-m", "tests.eval.trace.plain_process", str(KEPT))


def test_a_difference_names_what_else_is_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The header names the machine; a differing decision is reported with what differs about the machine."""
    header, *events = read_trace(KEPT)
    assert isinstance(header, TraceHeader)
    assert {"python", "numpy", "blas", "cpu", "libc"} <= header.machine.keys()
    changed = [
        msgspec.structs.replace(event, ttl_s=9.5)
        if isinstance(event, PinEvent) and event.kind == "decided"
        else event
        for event in events
    ]
    for machine, told in [
        ({**describe_machine(), "numpy": "1.26.4"}, "numpy: 1.26.4, now "),
        (describe_machine(), "written by the same program, python, numpy"),
        ({}, "does not say on what machine"),
    ]:
        here = msgspec.structs.replace(header, machine=machine)
        path = tmp_path / "trace.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in [here, *changed]))
        assert main(["trace", "replay", str(path)]) == 1
        assert told in capsys.readouterr().out


# ---- reading the deciding files ----

TRAINERS = {f"estimator/learned/{name}.py" for name in ("boosting", "work_trainer", "duration_trainer")}
AT_THE_EDGE = {"engine/core/outputs.py", "engine/core/routed_experts.py", *TRAINERS}
"""Arrays of token ids and expert numbers, made by the worker; and what fits a model, which is an input."""


def deciding() -> list[Path]:
    """Every file whose floats may affect a decision."""
    folders = ("estimator", "continuum", "engine/core", "eval/baselines")
    files = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return [path for path in files if path.relative_to(REPOSITORY).as_posix() not in AT_THE_EDGE]


def faults(source: str) -> Iterator[str]:
    """Yields imports and operators whose result depends on a library."""
    tree = ast.parse(source)
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in statement.names]
            modules = named if isinstance(statement, ast.Import) else [statement.module or ""]
            roots = {module.partition(".")[0] for module in modules}
            yield from sorted(roots & {"numpy", "scipy", "torch", "statistics", "polars"})
            if modules == ["math"]:
                yield from sorted({*BY_LIBRARY} & {*named})
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in BY_LIBRARY:
                yield f"math.{name}"
            case ast.BinOp(op=ast.Pow(), left=left, right=right):
                if not all(isinstance(getattr(side, "value", None), int) for side in (left, right)):
                    yield f"{ast.unparse(node)}"


@pytest.mark.slow
def test_what_decides_computes_by_itself() -> None:
    """Deciding files use ``+ - * /``, the square root and ``math.fsum``; ``estimator.plain_math`` has
    more."""
    files = deciding()
    assert len(files) > 50
    found = {path.relative_to(REPOSITORY).as_posix(): [*faults(path.read_text("utf-8"))] for path in files}
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import numpy as np", "numpy"),
        ("from scipy.special import gamma", "scipy"),
        ("from math import log", "log"),
        ("import math\nx = math.exp(1)", "math.exp"),
        ("def f(x): return x ** 0.5", "x ** 0.5"),
        ("def f(x): return x ** 2", "x ** 2"),
    ],
)
def test_a_librarys_float_is_found(source: str, found: str) -> None:
    assert [*faults(source)] == [found]
