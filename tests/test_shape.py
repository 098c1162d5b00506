"""Caps on the length of files and functions, and on the number of modules of a room.

Longer ones are listed with the reason why they are one thing, and with their own cap. An entry that is no
longer needed fails, too.
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

MAX_FILE = 400
MAX_TEST_FILE = 510
MAX_FUNCTION = 50
MAX_ROOM = 24

LONGER_FILES = {
    "engine/core/kv_cache/kv_cache_manager.py": (425, "What the scheduler asks for memory, in one place."),
    "engine/core/kv_cache/block_pool.py": (435, "Blocks, the lists that they are in, and who holds them."),
    "engine/core/scheduler.py": (636, "One step from the first request to the last: read it in one go."),
    "engine/api/openai_responses/turn.py": (441, "One response, from its body to its last event."),
    "engine/core_process/engine_core.py": (496, "The loop of the core and what it is asked to do."),
    "engine/core_process/core_client.py": (480, "Every call to the core, each a few lines."),
    "engine/frontend/async_llm.py": (405, "The engine as servers use it: a method for each of its promises."),
    "engine/tool_parsers/catalog.py": (475, "A table: the formats of calls and of reasoning, by name."),
    "engine/messages.py": (419, "Every message between processes, field by field."),
    "engine/metrics/table.py": (481, "A table: each metric with its help text."),
    "eval/agent_model/training/kinds.py": (470, "A table: the kinds of tasks that the bundled model learns."),
    "eval/cli/serve_flags.py": (526, "A table: the flags of one command."),
    "eval/load/planner.py": (480, "From a workload to what is sent when: one pass."),
    "eval/trace/analysis/life_reader.py": (416, "Each event of a trace, one method after another."),
    "eval/trace/analysis/tables.py": (466, "Tables of a trace, one after another."),
    "tracing/events.py": (555, "The schema: each event, each field explained."),
    "tracing/job_spans.py": (420, "Events of a job, paired into spans."),
    "tests/api/test_messages.py": (760, "One protocol, a test for each of its fields."),
    "tests/api/test_responses.py": (860, "One protocol, a test for each of its fields."),
    "tests/api/test_structured_output.py": (530, "One feature through each of the protocols."),
    "tests/core/test_scheduler_machine.py": (545, "One machine: all that may happen to a scheduler."),
    "tests/continuum/test_policy.py": (540, "The policy's promises, from the first turn to the last."),
    "tests/eval/trace/test_analysis.py": (555, "One table after another."),
    "tests/tool_parsers/test_slips.py": (625, "A table of slips, format by format."),
}
LONGER_FUNCTIONS = {
    "continuum/policy.py:__init__": (85, "Puts the policy together, part by part."),
    "engine/core/request.py:__init__": (85, "Sets each attribute, with its docstring."),
    "engine/core_process/engine_core.py:__init__": (67, "Puts the core together, part by part."),
    "engine/worker/executor.py:__init__": (55, "Puts the worker together, part by part."),
    "engine/worker/gpu/triton_ops.py:_rope_and_write": (60, "A kernel: one launch instead of three."),
    "engine/worker/loading/tiny_models.py:make_model_folder": (60, "A config, field by field."),
    "eval/cli/serve_flags.py:_add_model_flags": (60, "Flags, one after another."),
    "eval/demo/command.py:add_arguments": (85, "Flags, one after another."),
    "eval/report/metrics.py:summarize": (65, "Each figure of a report, by its name."),
    "tests/api/test_responses_reply.py:test_items_of_every_kind_are_understood": (
        55,
        "One conversation with an item of each kind.",
    ),
    "tests/core/engine_room.py:__init__": (56, "The options of an engine, one by one."),
    "tests/worker/attention_reference.py:make_case": (55, "A batch of attention, made array by array."),
}
LARGER_ROOMS = {
    "engine/worker/gpu": (37, "A kernel or a runner a file."),
}


def _sources() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split() if (REPOSITORY / name).exists()]


SOURCES = _sources()


def _text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def _is_in_the_wheel(name: str) -> bool:
    return name.split("/")[0] in IN_THE_WHEEL


def _functions(name: str) -> Iterator[tuple[str, int]]:
    """Yields the key and the number of lines of each function of a file."""
    for node in ast.walk(ast.parse(_text(name))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{name}:{node.name}", node.end_lineno - node.lineno + 1


def _over(sizes: dict[str, int], cap: int, exceptions: dict[str, tuple[int, str]]) -> dict[str, int]:
    """Names and sizes that exceed their cap."""
    return {name: size for name, size in sizes.items() if size > exceptions.get(name, (cap,))[0]}


def _not_needed(sizes: dict[str, int], cap: int, exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """Exceptions for what is gone, or does not exceed the general cap."""
    return [name for name in exceptions if sizes.get(name, 0) <= cap]


FILES = {name: _text(name).count("\n") for name in SOURCES}
PRODUCT_FILES = {name: size for name, size in FILES.items() if _is_in_the_wheel(name)}
OTHER_FILES = {name: size for name, size in FILES.items() if name not in PRODUCT_FILES}
ROOMS = dict(
    Counter(
        str(Path(name).parent)
        for name in SOURCES
        if _is_in_the_wheel(name) and not name.endswith("__init__.py")
    )
)


@cache
def _all_functions() -> dict[str, int]:
    """Lengths by file and function, the longest for equal names. Parsing takes seconds, so not on import."""
    return dict(sorted((key, size) for name in SOURCES for key, size in _functions(name)))


def _of(exceptions: dict[str, tuple[int, str]], sizes: dict[str, int]) -> dict[str, tuple[int, str]]:
    return {name: entry for name, entry in exceptions.items() if name in sizes}


@pytest.mark.parametrize(
    ("sizes", "cap", "exceptions"),
    [
        pytest.param(PRODUCT_FILES, MAX_FILE, _of(LONGER_FILES, PRODUCT_FILES), id="files"),
        pytest.param(OTHER_FILES, MAX_TEST_FILE, _of(LONGER_FILES, OTHER_FILES), id="files of tests"),
        pytest.param(ROOMS, MAX_ROOM, LARGER_ROOMS, id="rooms"),
    ],
)
def test_nothing_outgrows_its_cap(
    sizes: dict[str, int], cap: int, exceptions: dict[str, tuple[int, str]]
) -> None:
    assert _over(sizes, cap, exceptions) == {}, "split it, or give a reason above"
    assert _not_needed(sizes, cap, exceptions) == [], "these need no exception any more"


@pytest.mark.slow
def test_no_function_outgrows_its_cap() -> None:
    test_nothing_outgrows_its_cap(_all_functions(), MAX_FUNCTION, LONGER_FUNCTIONS)


@pytest.mark.slow
def test_every_exception_names_what_exists() -> None:
    known = FILES.keys() | _all_functions().keys() | ROOMS.keys()
    assert [
        name
        for table in (LONGER_FILES, LONGER_FUNCTIONS, LARGER_ROOMS)
        for name in table
        if name not in known
    ] == []
