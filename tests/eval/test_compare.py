"""``continuum compare`` turns result files into one report."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.report.metrics import RunResult
from eval.report.results import ResultFile, write_results
from tests.eval.hand_made import run


def _written(path: Path, *runs: RunResult, command: str = "") -> str:
    write_results(path, ResultFile(runs=list(runs), command=command))
    return str(path)


def test_two_results_are_set_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means, ratio and interval are in the order of the files."""
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
    """The shortest distinguishing parts of paths name the runs; a file given twice is numbered."""
    paths = [_written(tmp_path / name / "result.json", run("result", 9.0)) for name in ("old", "new")]
    assert main(["compare", *paths]) == 0
    told = capsys.readouterr().out
    assert "result (new/result) / result (old/result)" in told
    assert "different" not in told
    assert main(["compare", paths[0], paths[0]]) == 0
    assert "(result, file 2)" in capsys.readouterr().out


def test_settings_that_differ_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other seeds, workloads or models weaken a ratio, so the report states them."""
    first = _written(tmp_path / "a.json", run("a", 9.0, seed=1))
    second = _written(tmp_path / "b.json", run("b", 9.0, seed=2, workload="v", model="n"))
    assert main(["compare", first, second]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "b compared with a: another workload (v, not w.jsonl)" in told
    assert "b compared with a: another model (n, not m)" in told
    assert "b compared with a: seeds 2, not 1" in told


def test_flags_that_differ_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller pool or shorter jobs are no fair comparison; the output file makes no difference."""
    flags = "--kv-tokens 60000 --router=session --json a.json --seeds 3"
    first = _written(tmp_path / "a.json", run("a", 9.0), command=f"continuum simulate {flags}")
    other = "--kv-tokens=400000 --router session --share-prefixes --json b.json --seeds 3"
    second = _written(tmp_path / "b.json", run("b", 9.0), command=f"continuum simulate {other}")
    assert main(["compare", first, second]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("!")]
    assert told == [
        "! b compared with a: with --kv-tokens 400000, not 60000",
        "! b compared with a: with --share-prefixes",
    ]
    assert main(["compare", second, first]) == 0
    assert "! a compared with b: without --share-prefixes" in capsys.readouterr().out


def test_other_jobs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many jobs of one seed, but cut to fewer turns, are less work, so the report states it."""
    short = run("b", 9.0)
    for job in short.jobs:
        job.num_planned_turns = 1
    paths = [_written(tmp_path / "a.json", run("a", 9.0)), _written(tmp_path / "b.json", short)]
    assert main(["compare", *paths]) == 0
    assert (
        "! b compared with a: other jobs: of 4 turns, not 8 (at all jobs at once)" in capsys.readouterr().out
    )


def test_notes_are_told_apart_where_their_numbers_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pools of 5 and of 9 are not merged into '5 to 9'; over the seeds of one run numbers may range."""
    small, large = ([run(name, 9.0, seed=seed) for seed in (0, 1)] for name in ("a", "b"))
    for result, blocks, gaps in zip([*small, *large], (5, 5, 9, 9), (1, 2, 1, 2), strict=True):
        result.notes = [f"KV pool: {blocks} blocks", f"tool times: {gaps} ASSUMED"]
    paths = [_written(tmp_path / "a.json", *small), _written(tmp_path / "b.json", *large)]
    assert main(["compare", *paths]) == 0
    told = capsys.readouterr().out
    for line in ("- a: KV pool: 5 blocks", "- b: KV pool: 9 blocks", "- tool times: 1 to 2 ASSUMED"):
        assert line in told.splitlines()


def test_a_result_without_runs_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result without runs is refused, not skipped."""
    paths = [_written(tmp_path / "a.json", run("a", 9.0)), _written(tmp_path / "b.json")]
    assert main(["compare", *paths]) == 1
    assert capsys.readouterr().err == f"continuum: {paths[1]} holds no runs.\n"


def test_many_results_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than two files give one table."""
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
    """The error names the file and the fault; no result is printed."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["compare", _written(tmp_path / "good.json", run("a", 9.0)), str(path)]) == 1
    printed = capsys.readouterr()
    assert "x.json" in printed.err
    assert told in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
