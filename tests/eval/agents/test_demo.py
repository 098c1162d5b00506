"""Promises of the demonstration with live agents: real work under each policy, and a table of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.agent_model.tasks import Task
from eval.agents.live_tasks import live_tasks
from eval.load.records import read_records
from eval.report.results import read_results
from tests.clients.scripted_model import Script, make_scripted_model, tool_call

NUM_TASKS = 4
PAGE_LINES = 12


def script_of(task: Task) -> Script:
    """A script that solves the task."""
    calls = ["\n".join(tool_call(c.name, **c.arguments) for c in calls) for calls in task.rounds]
    return Script(json.dumps(task.prompt)[1:-1], (*calls, task.answer))


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that solves the tasks of the demonstration."""
    tasks = live_tasks(NUM_TASKS, 0, PAGE_LINES)
    return make_scripted_model(
        tmp_path_factory.mktemp("solver") / "model", [script_of(task) for task in tasks]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agents_work_under_each_policy(
    solver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every task is solved with executed calls; traces, records and results are written."""
    sizes = (
        "--tasks",
        str(NUM_TASKS),
        "--agents",
        "2",
        "--page-lines",
        str(PAGE_LINES),
        "--time-scale",
        "0.05",
    )
    assert main(["demo", "--model", str(solver), "--out", str(tmp_path), *sizes]) == 0
    printed = capsys.readouterr()
    assert "continuum / fcfs" in printed.out
    assert f"{NUM_TASKS} tasks for 2 agents at once" in printed.err
    for policy in ("fcfs", "continuum"):
        (run,) = read_results(tmp_path / policy / "result.json").runs
        assert (run.num_solved, run.num_completed_jobs, run.num_errors) == (NUM_TASKS, NUM_TASKS, 0)
        assert run.kv_usage_at_end == 0
        records = read_records(tmp_path / policy / "records.jsonl")
        assert len(records.turns) == run.num_turns > 3 * NUM_TASKS
        assert {turn.tool for turn in records.turns} >= {"read_file", None}
        for name in ("trace.jsonl", "server.log"):
            assert (tmp_path / policy / name).stat().st_size > 0
    assert run.pins_ended["handed_over"] > 0
    assert sum(run.pins_ended.values()) <= run.num_turns


def test_tasks_are_the_same_for_the_same_seed() -> None:
    """Equal seeds give equal tasks; in each, a file of at least the requested length is read early."""
    tasks = live_tasks(6, 3, 30)
    assert tasks == live_tasks(6, 3, 30)
    assert tasks != live_tasks(6, 4, 30)
    for task in tasks:
        read = [c.arguments["path"] for calls in task.rounds for c in calls if c.name == "read_file"]
        first = next(path for path in read if path in task.files)
        assert len(task.files[first].splitlines()) > 30


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layers", "2"], "--layers needs --workload"),
        (["--workload", "synthetic", "--agents", "2"], "--agents is for live agents"),
        (["--model", "/no/such"], "/no/such is not a model folder"),
    ],
)
def test_flags_that_do_not_fit_are_errors(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags that do not fit are refused."""
    assert main(["demo", "--out", str(tmp_path), *arguments]) == (1 if "--model" in arguments else 2)
    assert told in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_a_demo_that_cannot_be_written_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in place of its folder, or two runs for one folder, is refused before anything runs."""
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"continuum: Cannot write to {tmp_path / 'file'}: not a folder.\n"
    assert main(["demo", "--out", str(tmp_path / "new"), "--policies", "fcfs", "fcfs"]) == 2
    assert capsys.readouterr().err == "continuum: Policy fcfs is named twice.\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_repeats_are_runs_of_different_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each repeat has its own folder and jobs; figures are means with intervals."""
    sizes = (
        "--jobs",
        "2",
        "--max-turns",
        "2",
        "--hidden-size",
        "64",
        "--layers",
        "1",
        "--time-scale",
        "0.05",
    )
    arguments = ["--workload", "synthetic", *sizes, "--policies", "fcfs", "--repeats", "2"]
    assert main(["demo", *arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "at all jobs at once (2 seeds)" in printed.out
    assert "±" in printed.out
    runs = [read_results(tmp_path / f"repeat-{n}" / "fcfs" / "result.json").runs[0] for n in (1, 2)]
    assert [one.setting.seed for one in runs] == [0, 1]
    assert runs[0].prompt_tokens != runs[1].prompt_tokens
