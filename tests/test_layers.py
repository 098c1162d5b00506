"""Checks the layers: walks every import of every package and refuses those that point up or sideways."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "tracing": set[str](),
    "engine": {"tracing"},
    "estimator": {"tracing"},
    "continuum": {"engine", "estimator", "tracing"},
    "eval": {"continuum", "engine", "estimator", "tracing"},
    "benchmarks": {"continuum", "engine", "estimator", "eval", "tracing"},
}
"""``benchmarks`` is in no wheel, and may use everything in it."""
OURS = MAY_IMPORT.keys() | {"tests"}

FLOORS = {
    "engine": (
        ("records",),
        ("config",),
        ("process", "tokenization", "kv_transfer", "media"),
        ("core",),
        ("tool_parsers", "reasoning"),
        ("structured_output", "watch"),
        ("worker",),
        ("core_process",),
        ("core_group",),
        ("frontend",),
        ("metrics",),
        ("api",),
    ),
    "continuum": (("jobs", "learning", "routing"), ("queueing",), ("retention", "reports"), ("cli",)),
}
"""The rooms of a package from the ground up: a room imports no room of a higher floor. Files next to the
rooms (errors, clock, version) belong to no floor."""

IMPURE = {
    "torch",
    "zmq",
    "socket",
    "asyncio",
    "time",
    "transformers",
    "tokenizers",
    "llguidance",
    "logging",
    "threading",
    "multiprocessing",
    "subprocess",
}
"""What the pure core must not import: devices, threads, processes, clocks, text, grammars."""

TORCH_USERS = (
    "engine/worker/",
    "benchmarks/cpu/experts.py",
    "benchmarks/cpu/states.py",
    "benchmarks/gpu/measures/",
    *(f"benchmarks/agent_model/{name}.py" for name in ("examples", "initial_weights", "network", "train")),
)
"""Users of torch: the worker, benchmarks and GPU checks of its kernels, and the training of the bundled
model; all else must start without torch."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: the importing file, the target, and whether it runs only with a function."""

    path: str
    line: int
    target: str
    lazy: bool
    bare: bool

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """All imports of a file, including those for type checking and those inside functions."""
    name = path.relative_to(root).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bare = alias.asname is None and "." not in alias.name
                yield Import(name, node.lineno, alias.name, id(node) in lazy, bare)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield Import(name, node.lineno, node.module, id(node) in lazy, bare=False)


def fault_of(found: Import) -> str | None:
    """Why an import is forbidden, or None."""
    if found.root == "eval" and found.bare:
        return "hides the builtin eval: write `from eval.x import y`"
    if found.root in OURS and found.root != found.package and found.root not in MAY_IMPORT[found.package]:
        return f"{found.package} must not know {found.root}"
    if (room := _room_above(found)) is not None:
        return f"{room} is on a floor above"
    if found.path.startswith("engine/core/") and found.root in IMPURE:
        return "the core is pure"
    if found.root == "torch" and not found.path.startswith(TORCH_USERS):
        return "only the worker may import torch"
    return None


def _room_above(found: Import) -> str | None:
    """The room on a higher floor that an import names, in a package that has floors."""
    floors = FLOORS.get(found.package, ())
    height = {room: floor for floor, rooms in enumerate(floors) for room in rooms}
    own, other = found.path.split("/")[1], [*found.target.split("."), ""][1]
    if found.root != found.package or own not in height or other not in height:
        return None
    return f"{found.package}.{other}" if height[other] > height[own] else None


def violations(root: Path) -> list[str]:
    """Every wrong import below ``root``, as ``file:line imports x: why``."""
    return [
        f"{found.path}:{found.line} imports {found.target}: {fault}"
        for package in MAY_IMPORT
        for path in sorted((root / package).rglob("*.py"))
        for found in imports_of(path, root)
        if (fault := fault_of(found)) is not None
    ]


@pytest.mark.slow
def test_imports_point_down_only() -> None:
    """No package imports one above or next to it, and the core stays pure."""
    assert violations(REPOSITORY) == []


def test_the_core_loads_no_heavy_library() -> None:
    """Importing the scheduler loads no torch, sockets or tokenizers, even indirectly."""
    code = (
        "import sys, pkgutil, importlib, engine.core as core\n"
        "names = [module.name for module in pkgutil.walk_packages(core.__path__, 'engine.core.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "heavy = {'torch', 'zmq', 'transformers', 'tokenizers', 'llguidance', 'fastapi'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("engine/frontend/llm.py", "from continuum.policy import X", "engine must not know continuum"),
        ("engine/frontend/llm.py", "from estimator.cost import X", "engine must not know estimator"),
        ("estimator/cost.py", "import engine.core.request", "estimator must not know engine"),
        ("tracing/writer.py", "from engine.clock import Clock", "tracing must not know engine"),
        (
            "continuum/retention/pins.py",
            "def f():\n    from eval.load.bench import main",
            "continuum must not know eval",
        ),
        ("engine/core/scheduler.py", "from engine.frontend.llm import LLM", "a floor above"),
        ("continuum/jobs/job.py", "from continuum.retention.pins import Pin", "a floor above"),
        ("eval/load/bench.py", "from tests.conftest import x", "eval must not know tests"),
        ("eval/load/bench.py", "import eval", "hides the builtin"),
        ("engine/core/scheduler.py", "import time", "the core is pure"),
        ("engine/core/scheduler.py", "def f():\n    from logging import info", "the core is pure"),
        ("engine/api/processes/server.py", "import torch.nn", "only the worker"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    """A violation of each rule, in a separate tree, is reported with file and line."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    (found,) = violations(tmp_path)
    assert found.startswith(f"{path}:")
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("continuum/cli/main.py", "from continuum.routing.catalog import router_factory"),
        ("continuum/policy.py", "from engine.core.policy import Pin\nfrom estimator.durations import D"),
        ("engine/worker/sampler.py", "import torch"),
        ("engine/clock.py", "import time"),
        ("eval/load/bench.py", "from continuum.cli.main import main\nfrom eval.report.tables import table"),
    ],
)
def test_a_proper_import_passes(tmp_path: Path, path: str, source: str) -> None:
    """Allowed imports are not reported."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    assert violations(tmp_path) == []
