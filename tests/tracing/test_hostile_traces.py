"""Every command of ``continuum trace`` on hostile traces: it answers or fails with a sentence, never with a
traceback, and no text in the trace controls a terminal or a spreadsheet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from continuum.cli.main import main
from tests.tracing.simulated import simulate
from tracing.progress import reading

Lines = list[dict[str, Any]]
JOB, OTHER = "swe-bench-0-0", "swe-bench-0-1"
EVIL = {
    "terminal": "\x1b]0;title\x07\x1b[31mred\x9b2J",
    "formula": "=1+cmd|'/C calc'!A0",
    "plus": "+SUM(1)",
    "at": "@x",
    "minus": "-2+3",
    "tab": "\t=1",
    "line": "a\nERROR forged: line\r",
    "bidi": "a\u202eb\u2028c",
}
COMMANDS = ("summary", "jobs", "pins", "explain", "validate", "report", "diff", "replay", "csv", "perfetto")
FORMATS = {"csv": "turns.csv", "perfetto": "out.json"}
COMMANDING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    trace = simulate(tmp_path_factory.mktemp("trace"), "continuum", "--jobs", "4", "--max-turns", "4").path
    return [json.loads(line) for line in trace.read_text().splitlines()]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ask(command: str, trace: Path, job: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs a command; returns its exit code and its whole output."""
    more = {
        "explain": ["--", job],
        "report": ["--out", str(trace.with_name("page.html"))],
        "diff": [str(trace)],
    }.get(command, [])
    if command in FORMATS:
        more = ["--format", command, "--out", str(trace.with_name(FORMATS[command]))]
        command = "export"
    capsys.readouterr()
    code = main(["trace", command, str(trace), *more])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVIL)
def test_names_command_nothing(
    lines: Lines, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of a job and its calls are hostile: each command answers, and no name forges a line."""
    evil = EVIL[kind]
    text = json.dumps(lines).replace(JOB, json.dumps(evil)[1:-1]).replace("Bash", json.dumps(evil)[1:-1])
    trace = write(tmp_path / "trace.jsonl", json.loads(text))
    for command in COMMANDS:
        code, said = ask(command, trace, evil, capsys)
        assert code == 0 or command in ("validate", "replay"), said
        assert not COMMANDING.search(said), (command, said)
        assert "\nERROR forged" not in said
    for row in csv.reader(io.StringIO((tmp_path / "turns.csv").read_text())):
        for cell in row:
            assert not cell or cell[0] not in "=+@\t\r\n-" or re.fullmatch(r"-?[\d.e+-]+", cell), cell


def test_json_stays_json(lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON holds the exact name, but no terminal control characters."""
    text = json.dumps(lines).replace(JOB, json.dumps(EVIL["terminal"])[1:-1])
    trace = write(tmp_path / "trace.jsonl", json.loads(text))
    assert main(["trace", "jobs", str(trace), "--json"]) == 0
    said = capsys.readouterr().out
    assert not COMMANDING.search(said)
    assert EVIL["terminal"] in {job["job_id"] for job in json.loads(said)}


def _set(tag: str, name: str, value: object) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        line = next(line for line in lines[40:] if line["type"] == tag)
        inner = line.get(name)
        if isinstance(inner, dict) and inner:
            inner[next(iter(inner))] = value
        else:
            line[name] = value

    return change


def _jump(seconds: float) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        for line in lines[len(lines) // 2 :]:
            if "now" in line:
                line["now"] += seconds

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_set("step_snapshot", "num_waiting", 2**63), "num_waiting is 9223372036854775808, beyond"),
        (_set("step_snapshot", "pinned_blocks", 10**40), "pinned_blocks is 1000000000000000000"),
        (_set("step_decision", "tokens", 2**40), "beyond 2,147,483,647"),
        (_set("step_decision", "step", -(10**30)), "step is -100000"),
        (_set("request_arrived", "max_tokens", 2**64), "max_tokens is"),
        (_set("pin_event", "deadline_s", 1e300), "deadline_s is 1e+300"),
        (_set("step_output", "now", 1e308), "now is 1e+308"),
        (_jump(-3600.0), None),
        (_jump(1e6), None),
        (_jump(-1e14), None),
        (_jump(1e14), None),
    ],
)
def test_numbers_beyond_reason_and_clocks_that_jump(
    lines: Lines,
    change: Callable[[Lines], None],
    complaint: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command answers, or says what is wrong in a sentence that names the line."""
    changed = json.loads(json.dumps(lines))
    change(changed)
    trace = write(tmp_path / "trace.jsonl", changed)
    for command in COMMANDS:
        code, said = ask(command, trace, JOB, capsys)
        assert code in (0, 1)
        if complaint is not None:
            assert complaint in said, command
            assert f"{trace}, line " in said
            assert command == "validate" or said.count("\n") == 1


def test_what_is_compressed_otherwise_is_named(
    lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace in another compression is refused by that compression's name."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "trace.jsonl", lines).read_bytes()))
    for command in COMMANDS:
        code, said = ask(command, path, JOB, capsys)
        assert code == 1
        assert "it is compressed with gzip; a trace is plain, or compressed with zstd" in said


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [_Terminal, io.StringIO])
def test_a_long_reading_is_shown_on_a_terminal(
    stderr: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is shown only on a terminal, and the file's name is escaped."""
    shown = stderr()
    monkeypatch.setattr("sys.stderr", shown)
    with reading(Path("a\x1b[31m.jsonl"), 2_000_000, delay_s=0.0) as progress:
        progress(1_000_000)
    assert ("reading a\\u001b[31m.jsonl" in shown.getvalue()) == shown.isatty()
    assert shown.isatty() or not shown.getvalue()
