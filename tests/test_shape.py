"""Caps on the statements of files and functions, and on the modules of a room.

Statements are counted, not lines: packing lines would meet a cap on lines. What exceeds a cap is listed with
the reason why it is one thing, and with its own cap. An entry that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
IN_THE_WHEEL = ("engine", "continuum", "estimator", "tracing", "eval")

MAX_FILE = 300
MAX_FUNCTION = 40
MAX_ROOM = 24
MAX_PACKED = 1.0
"""Assignments of several unrelated values in one statement, per 1,000 lines of the product."""

LARGER_FILES = {
    "engine/core/scheduler.py": (397, "One step from the first request to the last: read it in one go."),
    "tests/api/test_messages.py": (351, "One protocol, a test for each of its fields."),
    "tests/api/test_responses.py": (350, "One protocol, a test for each of its fields."),
    "tests/continuum/test_policy.py": (374, "The policy's promises, from the first turn to the last."),
    "tests/eval/trace/test_analysis.py": (311, "One table after another."),
}
LARGER_FUNCTIONS = {
    "engine/core/request.py:__init__": (41, "Sets each attribute, with its docstring."),
}
LARGER_ROOMS = {
    "engine/worker/gpu": (37, "A kernel or a runner a file."),
    "eval/sim": (25, "A module a subject of the simulator, and two that read models."),
    "engine/worker/models/families": (60, "A family a file."),
}


def _sources() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split() if (REPOSITORY / name).exists()]


SOURCES = _sources()
ROOMS = dict(
    Counter(
        str(Path(name).parent)
        for name in SOURCES
        if name.split("/")[0] in IN_THE_WHEEL and not name.endswith("__init__.py")
    )
)


def statements(tree: ast.AST) -> int:
    """Statements below a node. Docstrings and imports do not count; a packed assignment counts each value."""
    return sum(_weight(node) for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree)


def _weight(statement: ast.stmt) -> int:
    if isinstance(statement, ast.Import | ast.ImportFrom) or _is_text(statement):
        return 0
    packed = _packed(statement)
    return 1 if packed is None else len(packed.elts)


def _is_text(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _packed(statement: ast.AST) -> ast.Tuple | None:
    """The values of ``a, b = x, y``; None for any other statement."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return None
    return statement.value if isinstance(statement.value, ast.Tuple) else None


@cache
def _trees() -> dict[str, ast.Module]:
    """Parsing all files takes seconds: not on import."""
    return {name: ast.parse((REPOSITORY / name).read_text(encoding="utf-8")) for name in SOURCES}


@cache
def _files() -> dict[str, int]:
    return {name: statements(tree) for name, tree in _trees().items()}


@cache
def _functions() -> dict[str, int]:
    """The largest of the functions of one name in one file."""
    return dict(sorted(pair for name, tree in _trees().items() for pair in _functions_of(name, tree)))


def _functions_of(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}:{node.name}", statements(node)


def _check(sizes: dict[str, int], cap: int, exceptions: dict[str, tuple[int, str]]) -> None:
    over = {name: size for name, size in sizes.items() if size > exceptions.get(name, (cap,))[0]}
    assert over == {}, "split it, or give a reason above"
    not_needed = [name for name in exceptions if sizes.get(name, 0) <= cap]
    assert not_needed == [], "these need no exception any more"


@pytest.mark.slow
def test_no_file_outgrows_its_cap() -> None:
    _check(_files(), MAX_FILE, LARGER_FILES)


@pytest.mark.slow
def test_no_function_outgrows_its_cap() -> None:
    _check(_functions(), MAX_FUNCTION, LARGER_FUNCTIONS)


def test_no_room_outgrows_its_cap() -> None:
    _check(ROOMS, MAX_ROOM, LARGER_ROOMS)


@pytest.mark.slow
def test_a_statement_says_one_thing() -> None:
    """Values are packed into one assignment only where they belong together, as in a swap."""
    ours = {name: tree for name, tree in _trees().items() if name.split("/")[0] in IN_THE_WHEEL}
    num_packed = sum(_packed(node) is not None for tree in ours.values() for node in ast.walk(tree))
    num_lines = sum((REPOSITORY / name).read_text(encoding="utf-8").count("\n") for name in ours)
    assert num_packed <= MAX_PACKED * num_lines / 1000


def test_packed_values_count_each() -> None:
    """The counting, by hand."""
    code = 'import os\n\ndef f():\n    """Text."""\n    a, b = 1, 2\n    if a:\n        return b\n'
    assert statements(ast.parse(code)) == 5
