"""No command overwrites its input, or one of its results with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.report.results import ResultFile, write_results
from eval.workloads.catalog import load_jobs
from eval.workloads.recorded import write_jobs
from tests.eval.hand_made import run
from tests.tracing.simulated import simulate

SIMULATE = "simulate --jobs 3 --policies fcfs --processes 1 --workload"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with jobs, a result and a profile, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    write_jobs(Path("jobs.jsonl"), load_jobs("bfcl", 5, 0))
    write_results(Path("result.json"), ResultFile(runs=[run("fcfs", 9.0)]))
    write_jobs(Path("jobs.part0002.jsonl"), load_jobs("bfcl", 5, 0))
    Path("sub").mkdir()
    Path("link.jsonl").symlink_to("jobs.jsonl")
    Path("hard.jsonl").hardlink_to("jobs.jsonl")
    return tmp_path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("trace"), "continuum").path


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (f"{SIMULATE} jobs.jsonl --json jobs.jsonl", "--workload and --json"),
        (f"{SIMULATE} jobs.jsonl --json sub/../jobs.jsonl", "--workload and --json"),
        (f"{SIMULATE} jobs.jsonl --html link.jsonl", "--workload and --html"),
        (f"{SIMULATE} jobs.jsonl --trace hard.jsonl", "--workload and --trace"),
        (f"{SIMULATE} jobs.part0002.jsonl --trace jobs.jsonl", "--workload and --trace"),
        (f"{SIMULATE} bfcl+jobs.jsonl --json jobs.jsonl", "--workload and --json"),
        (f"{SIMULATE} bfcl --profile result.json --json result.json", "--profile and --json"),
        (
            f"{SIMULATE} bfcl --policies fcfs,continuum:estimator_state=result.json --json result.json",
            "--policies and --json",
        ),
        ("workload jobs.jsonl --jobs 3 --out jobs.jsonl", "FILE and --out"),
        ("compare result.json --html result.json", "RESULT.json and --html"),
        ("bench --workload jobs.jsonl --records jobs.jsonl", "--workload and --records"),
        ("bench --workload bfcl --against result.json --json result.json", "--against and --json"),
        ("profile --model sub --from-trace jobs.jsonl --json jobs.jsonl", "--from-trace and --json"),
        ("profile --model sub --json sub/config.json", "--model and --json"),
    ],
)
def test_what_is_read_is_not_written_over(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, options: str
) -> None:
    """A file named by any path, link or mix is refused with both options, and stays."""
    kept = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(command.split()) == 1
    told = capsys.readouterr().err
    assert f"{options} are the same file, " in told
    assert told.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (f"{SIMULATE} bfcl --json q --html q", "--json and --html"),
        (f"{SIMULATE} bfcl --json q --trace ./q", "--json and --trace"),
        ("bench --workload bfcl --json q --records q", "--json and --records"),
        ("reproduce --json q --html q", "--json and --html"),
        ("profile --model sub --json q --trace q", "--json and --trace"),
    ],
)
def test_no_result_is_written_over_another(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, options: str
) -> None:
    """The refusal comes before anything runs or is created."""
    assert main(command.split()) == 1
    assert f"{options} are the same file, q: one result would be lost." in capsys.readouterr().err
    assert not (folder / "q").exists()


@pytest.mark.parametrize(
    "command",
    [
        "trace export {} --format perfetto --out {}",
        "trace export {} --format mooncake --out {}",
        "trace report {} --out {}",
    ],
)
def test_a_trace_is_not_written_over(trace: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A trace named by its folder is refused too."""
    kept = trace.read_bytes()
    for read in (trace, trace.parent):
        assert main(command.format(read, trace).split()) == 1
        assert "FILE and --out are the same file, " in capsys.readouterr().err
    assert trace.read_bytes() == kept


def test_a_table_does_not_replace_the_trace(trace: Path, tmp_path: Path) -> None:
    """The refusal holds also if the trace has a table's name."""
    copy = tmp_path / "turns.csv"
    copy.write_bytes(trace.read_bytes())
    for out in (copy, tmp_path):
        assert main(["trace", "export", str(copy), "--format", "csv", "--out", str(out)]) == 1
    assert copy.read_bytes() == trace.read_bytes()


def test_what_keeps_nothing_may_be_named_twice(folder: Path) -> None:
    """/dev/null and the like may be named twice."""
    assert main(f"{SIMULATE} bfcl --json /dev/null --trace /dev/null".split()) == 0


@pytest.mark.parametrize("file", ["sub/fcfs/trace.jsonl", "sub/../sub/jobs.jsonl"])
@pytest.mark.parametrize("mixed_with", ["", "bfcl+"])
def test_a_demo_does_not_read_what_it_writes_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str, mixed_with: str
) -> None:
    """The records of an earlier demo can be replayed into another folder only."""
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(Path("jobs.jsonl").read_bytes())
    assert main(["demo", "--workload", mixed_with + file, "--out", "sub"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"continuum: --workload {file} is in the folder of --out, ")
    assert Path(file).read_bytes() == Path("jobs.jsonl").read_bytes()
