"""Promises of ``make bench-cpu``: it measures every case on our server and on others in one run, reports and
skips servers that fail, and names the wrong field of a bad description."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu.cases import QUICK, Case
from benchmarks.cpu.command import main

COUNTING = f"{sys.executable} {Path(__file__).with_name('counting_server.py')} {{model}} {{port}}"
PEERS = {
    "peers": [
        {"name": "counting", "command": COUNTING},
        {"name": "stingy", "command": COUNTING, "model_name": "stingy", "cases": ["decode"]},
        {"name": "broken", "command": "false {model} {port}"},
        {"name": "missing", "command": "/no/such/server {model} {port}"},
    ]
}


@pytest.mark.slow
@pytest.mark.long
def test_all_cases_are_measured_beside_other_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a row per figure with ours, theirs and the ratio; a failed server gets one sentence."""
    peers, out = tmp_path / "peers.json", tmp_path / "out" / "cpu.json"
    peers.write_text(json.dumps(PEERS))
    arguments = ["--quick", "--folder", str(tmp_path), "--peers", str(peers), "--json", str(out)]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    for case in QUICK:
        ours, theirs, ratio = [cell.strip() for cell in row(told, case).split("|")[2:5]]
        assert ours != "-"
        assert theirs != "-"
        assert ratio.endswith("x")
    assert "stingy: tiny, decode, batch 1 failed: asked for 4 tokens, it gave 3.\n" in told
    assert "broken: the start for tiny failed: it ended with exit code 1; see " in told
    assert "missing: the start for tiny failed: No such file or directory: /no/such/server.\n" in told
    check_record(json.loads(out.read_text()))


def row(told: str, case: Case) -> str:
    """The case's first row in the table."""
    start = "second turn" if case.group == "prefix" else case.title
    return next(line for line in told.splitlines() if line.startswith(f"| {start}"))


def check_record(record: dict[str, Any]) -> None:
    """Asserts that every figure has one value, for the one round, and that our memory exceeds the weights."""
    (model,) = record["models"]
    figures = {
        contender["name"]: {each["figure"]: each["values"] for each in contender["figures"]}
        for contender in model["contenders"]
    }
    assert figures["ours"].keys() == figures["counting"].keys()
    for values in figures["ours"].values():
        assert len(values) == 1
        assert values[0] > 0
    assert figures["ours"]["memory_mb"][0] * 1e6 > model["weight_bytes"] > 25e6


@pytest.mark.parametrize(
    ("peer", "complaint"),
    [
        ({"command": "x {model} {port}"}, "missing required field `name` - at `$.peers[0]`"),
        ({"name": "x", "command": 5}, "Expected `str`, got `int` - at `$.peers[0].command`"),
        ({"name": "x", "command": "x {model}"}, "`$.peers[0].command` does not say where {port} goes"),
        ({"name": "ours", "command": "x {model} {port}"}, "`$.peers[0].name` is 'ours', which is taken"),
        (
            {"name": "x", "command": "x {model} {port}", "cases": ["speed"]},
            "`$.peers[0].cases` names 'speed'; there is decode, ",
        ),
        (
            {"name": "x", "command": "x {model} {port}", "models": {"big": "b"}},
            "`$.peers[0].models` names 'big'; there is tiny, small",
        ),
        ({"name": "x", "command": "x {model} {port}", "color": 1}, "unknown field `color`"),
        ({"name": "x", "command": "'x {model} {port}"}, "`$.peers[0].command` is no command"),
    ],
)
def test_a_bad_description_names_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], peer: dict[str, Any], complaint: str
) -> None:
    """A bad description is refused with one sentence that names file and field, before anything starts."""
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"peers": [peer]}))
    assert main(["--quick", "--folder", str(tmp_path), "--peers", str(path)]) == 1
    told = capsys.readouterr()
    assert complaint in told.err
    assert str(path) in told.err
    assert not told.out


def test_a_folder_holds_a_toml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--peers FOLDER`` reads the folder's peers.toml; a missing file or one without TOML is reported."""
    for content, complaint in (
        (None, "No such file"),
        ("[[peers]", "does not describe servers"),
        ("peers = []", "$.peers"),
    ):
        if content is not None:
            (tmp_path / "peers.toml").write_text(content)
        assert main(["--quick", "--folder", str(tmp_path), "--peers", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert complaint in told
        assert "peers.toml" in told
