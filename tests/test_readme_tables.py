"""The simulator tutorial shows the current output of its deterministic commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eval.report.comparison import Comparison
from eval.report.results import read_results
from eval.report.tables import main_table
from tests.readme_tables import (
    ELIDED,
    MEASUREMENTS,
    POLICIES,
    RATE,
    SIMULATE,
    TUTORIAL,
    WORKLOAD,
    block,
    commands,
    printed,
)

WRITE_ANEW = "make readme-tables puts in what is printed now"


def test_a_workload_is_what_the_tutorial_prints(tmp_path: Path) -> None:
    """The output has every line of the tutorial, in order; the tutorial may elide lines."""
    found = block(WORKLOAD)
    (command,) = commands(found["command"])
    command[command.index("--out") + 1] = str(tmp_path / "jobs.jsonl")
    lines = iter([line.rstrip() for line in printed(command).splitlines()])
    for line in found["output"].splitlines():
        assert line == ELIDED or line.rstrip() in lines, f"{line}: {WRITE_ANEW}"


def cells(line: str) -> list[str]:
    """A row of the table without its ratio and its stars, which depend on other rows."""
    plain = re.sub(r"[\d.]+x( [\d.]+-[\d.]+)?| -  ", " ", line.replace("*", ""))
    return plain.replace("± ", "±").split()


def row(table: str, policy: str) -> list[str]:
    """A policy's row at the higher rate."""
    rows = table[table.index(f"{RATE:g} jobs/s") :].splitlines()
    (found,) = [line for line in rows if line.split()[:1] == [policy]]
    return cells(found)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_simulation_is_what_the_tutorial_prints(tmp_path: Path) -> None:
    """``continuum``, at the rate at which memory is short, gives the tutorial's row."""
    found = block(SIMULATE)
    (command,) = commands(found["command"])
    flags = {"--rate": f"{RATE:g}", "--policies": "continuum", "--json": str(tmp_path / "today.json")}
    flags["--html"] = str(tmp_path / "today.html")
    for flag, value in flags.items():
        command[command.index(flag) + 1] = value
    printed(command)
    table = main_table(Comparison([read_results(tmp_path / "today.json")]))
    assert row(table, "continuum") == row(found["output"], "continuum"), WRITE_ANEW


def test_the_measurements_are_those_of_the_table() -> None:
    """``docs/lab/measurements.md`` and the tutorial show the same runs."""
    measured = MEASUREMENTS.read_text("utf-8")
    table = block(SIMULATE)["output"]
    for policy in POLICIES:
        (found,) = re.findall(rf"^\| `{re.escape(policy)}` \| ([\d.]+) \| ", measured, re.MULTILINE)
        assert found == row(table, policy)[1], WRITE_ANEW
    ratio = re.search(r"^  continuum .*?([\d.]+)x", table[table.index(f"{RATE:g} jobs/s") :], re.MULTILINE)
    assert ratio is not None
    assert f"jobs take {ratio[1]} of the time" in " ".join(TUTORIAL.read_text("utf-8").split()), WRITE_ANEW
