"""``continuum compare``: result files in, one report out."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli import main
from eval.metrics import RunResult
from eval.results import ResultFile, write_results
from tests.eval.hand_made import run


def _written(path: Path, *runs: RunResult) -> str:
    write_results(path, ResultFile(runs=list(runs)))
    return str(path)


def test_two_results_are_set_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means, their ratio and its interval, in the order of the files."""
    before = [run("fcfs", x, seed=seed) for seed, x in enumerate((10.0, 20.0))]
    after = [run("continuum", x, seed=seed) for seed, x in enumerate((5.0, 8.0))]
    files = [_written(tmp_path / "a.json", *before), _written(tmp_path / "b.json", *after)]
    assert main(["compare", *files]) == 0
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("job completion, mean")
    ]
    assert row.split()[4:] == ["15.00", "±63.53", "6.50", "±19.06", "0.45x", "0.11-1.85"]


def test_runs_of_one_name_are_called_by_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As much of the paths as tells them apart; a file given twice is numbered."""
    paths = [_written(tmp_path / name / "result.json", run("result", 9.0)) for name in ("old", "new")]
    assert main(["compare", *paths]) == 0
    told = capsys.readouterr().out
    assert "result (new/result) / result (old/result)" in told
    assert "different" not in told
    assert main(["compare", paths[0], paths[0]]) == 0
    assert "file 2)" in capsys.readouterr().out


def test_settings_that_differ_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other seeds, another workload or model make a ratio mean less, so the report says it."""
    first = _written(tmp_path / "a.json", run("a", 9.0, seed=1))
    second = _written(tmp_path / "b.json", run("b", 9.0, seed=2, workload="v", model="n"))
    assert main(["compare", first, second]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "b beside a: another workload (v, not w.jsonl)" in told
    assert "b beside a: another model (n, not m)" in told
    assert "b beside a: seeds 2, not 1" in told


def test_many_results_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than two files are allowed."""
    paths = [_written(tmp_path / f"{i}.json", run(f"policy-{i}", 9.0 + i)) for i in range(5)]
    assert main(["compare", *paths]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines() if line.startswith("  policy-")] == [
        f"policy-{i}" for i in range(5)
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "Cannot read the result"),
        ("{}", "is not a result of `--json`"),
        ('{"schema_version":2,"runs":[]}', "has schema version 2"),
        ('{"schema_version":1,', "is cut short or not JSON"),
        ('{"schema_version":1,"runs":' + "[" * 100_000, "is cut short or not JSON"),
    ],
)
def test_a_bad_file_is_one_sentence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, told: str
) -> None:
    """It names the file and what is wrong with it; nothing is printed as a result."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["compare", _written(tmp_path / "good.json", run("a", 9.0)), str(path)]) == 1
    printed = capsys.readouterr()
    assert "x.json" in printed.err
    assert told in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
