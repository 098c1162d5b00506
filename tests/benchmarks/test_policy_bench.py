"""``make bench-policy``: the grid on synthetic recordings, its tables, and promises that may be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policy.cell import Cell
from benchmarks.policy.command import main
from benchmarks.policy.promises import Promise, judge
from continuum.cli.main import main as continuum
from eval.report.results import read_results
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.recorded import write_jobs
from tests.eval.hand_made import run


def made_job(name: str, first_tokens: int, num_turns: int = 3, gap_s: float = 40.0) -> Job:
    """A job whose context grows by 2,000 tokens per turn."""
    turns = []
    for index in range(num_turns):
        is_last = index + 1 == num_turns
        context = first_tokens + 2000 * index
        turns.append(
            Turn(
                input_tokens=context,
                prefix_tokens=context - 1980 if index else 0,
                output_tokens=20,
                gap_kind=GapKind.END if is_last else GapKind.TOOL,
                gap_s=None if is_last else gap_s,
                gap_measured=not is_last,
                calls=() if is_last else (ToolRun("Bash", "pytest", gap_s),),
            )
        )
    return Job(job_id=name, source="by hand", turns=tuple(turns))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings under the names that the bench expects; the first is large for its loads."""
    made = tmp_path_factory.mktemp("workloads")
    for name, tokens in (
        ("agentcgroup-claude", 75_000),
        ("agentcgroup-glm", 5_000),
        ("kv-cache-tester", 10_000),
    ):
        write_jobs(made / f"{name}.jsonl", [made_job(f"{name}-{number}", tokens) for number in range(24)])
    return made


@pytest.mark.slow
@pytest.mark.long
def test_the_grid_has_a_table_per_cell_and_a_verdict_per_promise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every workload has a table per tier and load; each promise is kept, not kept, or open."""
    out = tmp_path / "policies.json"
    assert main(["--workloads", str(folder), "--quick", "--processes", "1", "--json", str(out)]) == 0
    told = capsys.readouterr()
    for traffic, loads in (
        ("agentcgroup-claude", ("0.02", "0.2")),
        ("agentcgroup-glm", ("0.05", "0.1")),
        ("kv-cache-tester", ("0.005", "0.015")),
        ("mix", ("0.1", "0.3")),
    ):
        for load in loads:
            for tier in ("with a host tier", "without a host tier"):
                assert f"{traffic} at {load} jobs/s {tier}: memory is " in told.out
    assert "agentcgroup-claude at 0.2 jobs/s without a host tier: memory is short" in told.out
    promises = told.out.partition("promises of continuum")[2].splitlines()[1:]
    verdicts = [line.partition("  ")[0].strip() for line in promises if not line.startswith(" ")]
    assert len(verdicts) == 11
    assert set(verdicts) <= {"kept", "NOT kept", "open"}
    assert "running mix with a host tier: 8 runs" in told.err

    runs = read_results(out).runs
    assert len(runs) == 4 * 2 * 2 * 4
    assert {each.num_completed_jobs for each in runs} == {20}
    assert continuum(["compare", str(out)]) == 0
    assert "host KV" in capsys.readouterr().out


@pytest.mark.slow
def test_one_workload_with_chosen_policies_and_seeds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds give intervals, fcfs always runs, promises about absent policies stay open, one load runs."""
    arguments = ["--workloads", str(folder), "--quick", "--only", "agentcgroup-glm", "--seeds", "2"]
    arguments += ["--heaviest"]
    policies = "fixed-ttl:2,fixed-ttl:60,continuum:fixed_ttl_s=1"
    assert main([*arguments, "--policies", policies, "--processes", "1"]) == 0
    told = capsys.readouterr().out
    assert "agentcgroup-claude at" not in told
    assert "agentcgroup-glm at 0.1 jobs/s" in told
    assert "agentcgroup-glm at 0.05 jobs/s" not in told
    assert "1.000 (1.000-1.000)" in told
    assert "better than fixed-ttl at its best setting, fixed-ttl:" in told
    assert "the oracle did not run" in told
    assert "promises of continuum:fixed_ttl_s=1" in told


@pytest.mark.slow
def test_a_cell_names_the_model_of_its_jobs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with sliding windows runs without a host tier only, which would merge its layers' groups."""
    out = tmp_path / "windows.json"
    only = "agentcgroup-claude-gpt-oss-20b"
    arguments = ["--workloads", str(folder), "--quick", "--only", only, "--json", str(out)]
    assert main([*arguments, "--policies", "continuum", "--processes", "1"]) == 0
    assert f"{only} at 0.4 jobs/s without a host tier: memory is short" in capsys.readouterr().out
    runs = read_results(out).runs
    assert {(run.setting.model, run.setting.jobs_per_s) for run in runs} == {
        ("gpt-oss-20b", 0.2),
        ("gpt-oss-20b", 0.4),
    }
    assert any("blocks of 64, of 2 groups" in note for note in runs[0].notes)


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(folder: Path, tmp_path: Path) -> None:
    """Equal arguments give byte-equal results with any number of processes."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for number, out in enumerate(files, 1):
        arguments = ["--quick", "--only", "kv-cache-tester", "--policies", "continuum", "--json", str(out)]
        assert main(["--workloads", str(folder), *arguments, "--processes", str(number)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "There is no recording {}/agentcgroup-claude.jsonl: name the folder that has it "),
        (["--only", "nothing"], "The bench has no workload 'nothing'; it has agentcgroup-claude, "),
        (["--policies", "lifo"], "Unknown policy 'lifo'; choose from fcfs, "),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot run is refused with one sentence and exit code 1, before anything runs."""
    assert main(["--workloads", str(tmp_path), *flags]) == 1
    told = capsys.readouterr()
    assert told.err.startswith(complaint.format(tmp_path))
    assert told.out == ""


def _cell(
    traffic: str, seconds: dict[str, float], *, host_tier: bool = False, cached_tokens: int = 0
) -> Cell:
    """A cell of one seed; ``seconds``: JCTs by policy. Without cached tokens fcfs recomputes a lot."""
    return Cell(
        traffic,
        0.1,
        host_tier,
        {name: [run(name, took_s, cached_tokens=cached_tokens)] for name, took_s in seconds.items()},
    )


def _verdict(promises: list[Promise], words: str) -> bool | None:
    (found,) = [promise for promise in promises if words in promise.text]
    return found.kept


def test_a_promise_is_broken_by_one_cell() -> None:
    """A tenth of a percent over the bound breaks a promise, and the worst cell is named."""
    good = _cell("mix", {"fcfs": 100.0, "continuum": 50.0})
    close = _cell("mix", {"fcfs": 100.0, "continuum": 101.0}, host_tier=True)
    over = _cell("mix", {"fcfs": 100.0, "continuum": 101.2}, host_tier=True)
    words = "more than 1 % worse"
    assert _verdict(judge([good, close]), words) is True
    assert _verdict(judge([good, over]), words) is False
    assert _verdict(judge([good, close]), "no cell worse than fcfs with a host tier") is False
    (worst,) = [promise.figure for promise in judge([good, over]) if words in promise.text]
    assert worst == "1 of 2 cells break it; the worst is 1.012 of fcfs's (mix at 0.1 jobs/s with a host tier)"


def test_a_multiple_is_promised_where_memory_is_short_only() -> None:
    """The multiple is promised only where fcfs recomputes tokens; there, one slow cell breaks it."""
    words = "at least 3x better"
    fast = _cell("agentcgroup-claude", {"fcfs": 100.0, "continuum": 33.3})
    slow = _cell("agentcgroup-glm", {"fcfs": 100.0, "continuum": 40.0})
    idle = _cell("agentcgroup-claude", {"fcfs": 100.0, "continuum": 100.0}, cached_tokens=100)
    assert _verdict(judge([idle]), words) is None
    assert _verdict(judge([idle, fast]), words) is True
    assert _verdict(judge([idle, fast, slow]), words) is False


def test_a_baseline_counts_at_its_best_setting_on_the_whole_grid() -> None:
    """Two settings that win one cell each do not make one that wins both; the oracle is not a baseline."""
    seconds = {"fcfs": 100.0, "continuum": 60.0, "oracle": 58.0}
    cells = [
        _cell("mix", {**seconds, "gate:0.7": 40.0, "gate:0.9": 110.0}),
        _cell("mix", {**seconds, "gate:0.7": 120.0, "gate:0.9": 50.0}),
    ]
    promises = judge(cells)
    assert _verdict(promises, "better than gate at its best setting, gate:0.7") is True
    assert _verdict(promises, "grid's mean better than fcfs") is True
    assert _verdict(promises, "within 5 % of the oracle") is True
    assert not any("better than oracle" in promise.text for promise in promises)
