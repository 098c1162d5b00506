"""Mixes of workloads: ``A+B+C``, equal numbers of jobs of each, in an order that the seed draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.report.results import read_results
from eval.workloads.job import Job
from eval.workloads.recorded import read_recorded, write_jobs
from tests.eval.workloads.jobs import chain, job, turn


def _jobs(name: str, count: int) -> list[Job]:
    return [job(f"{name}-{number}", *chain(3)) for number in range(count)]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """Ten jobs; the last is a sub-agent of the first."""
    path = tmp_path / "first.jsonl"
    begins, *others = chain(3)
    parent = job("first-0", turn(100, gap_kind=begins.gap_kind, gap_s=1.0, spawns=("sub",)), *others)
    write_jobs(path, [parent, *_jobs("first", 10)[1:], job("sub", parent_job="first-0")])
    return path


@pytest.fixture
def second(tmp_path: Path) -> Path:
    path = tmp_path / "second.jsonl"
    write_jobs(path, _jobs("second", 4))
    return path


def _mixed(out: Path, name: str, *flags: str) -> list[Job]:
    """Runs ``continuum workload`` on the mix."""
    assert main(["workload", name, *flags, "--out", str(out)]) == 0
    return read_recorded(out)[0]


def test_each_part_gives_as_many_jobs_in_an_order_of_the_seed(
    first: Path, second: Path, tmp_path: Path
) -> None:
    """Shares are equal, the first parts give the remainder; the same seed gives the same order."""
    name, out = f"{first}+{second}+bfcl", tmp_path / "out.jsonl"
    jobs = _mixed(out, name, "--jobs", "8", "--seed", "3")
    again = _mixed(out, name, "--jobs", "8", "--seed", "3")
    other = _mixed(out, name, "--jobs", "8", "--seed", "4")
    kinds = [each.job_id.partition("-")[0] for each in jobs if each.parent_job is None]
    assert [kinds.count(kind) for kind in ("first", "second", "bfcl")] == [3, 3, 2]
    assert kinds != sorted(kinds, key=("first", "second", "bfcl").index)
    assert jobs == again
    assert jobs != other


def test_without_a_number_each_part_gives_all_it_has(first: Path, second: Path, tmp_path: Path) -> None:
    """Sub-agents follow the job that starts them."""
    jobs = _mixed(tmp_path / "out.jsonl", f"{first}+{second}")
    assert len(jobs) == 15
    names = [each.job_id for each in jobs]
    assert names.index("sub") == names.index("first-0") + 1


def test_what_was_said_of_a_part_is_said_of_the_mix(
    first: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes of a part name the part."""
    assert main(["workload", f"{first}+{second}", "--jobs", "12", "--seed", "0"]) == 0
    told = capsys.readouterr().out
    assert "first.jsonl: 6 of 10 jobs were drawn" in told
    assert "second.jsonl: jobs are REPEATED: 6 were asked for, there are 4" in told


def test_a_file_with_a_plus_in_its_name_is_a_file(tmp_path: Path) -> None:
    """An existing file with a plus in its name is not split."""
    path = tmp_path / "a+b.jsonl"
    write_jobs(path, _jobs("whole", 2))
    assert [each.job_id for each in _mixed(tmp_path / "out.jsonl", str(path))] == ["whole-0", "whole-1"]


def test_jobs_of_one_name_are_refused(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result could not distinguish jobs of one name."""
    assert main(["workload", f"{first}+{first}"]) == 1
    name = f"{first}+{first}"
    told = capsys.readouterr().err
    assert told.startswith(f"continuum: The workload {name} has two jobs of the id ")


def test_a_mix_with_a_part_missing_is_refused(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty side of a plus, or a missing file, is refused."""
    assert main(["workload", f"{first}+"]) == 1
    assert capsys.readouterr().err == f"continuum: The workload {first}+ has nothing on one side of a '+'.\n"
    assert main(["workload", f"{first}+nowhere.jsonl"]) == 1
    assert "Cannot read the workload nowhere.jsonl" in capsys.readouterr().err


def test_a_mix_is_simulated(first: Path, second: Path, tmp_path: Path) -> None:
    """The result names the files without their folders."""
    out = tmp_path / "out.json"
    arguments = ["simulate", "--workload", f"{first}+{second}", "--policies", "fcfs", "--jobs", "6"]
    assert main([*arguments, "--rate", "1", "--kv-tokens", "10000", "--json", str(out)]) == 0
    (result,) = read_results(out).runs
    assert result.setting.workload == "first.jsonl+second.jsonl"
    assert result.num_completed_jobs == 6
