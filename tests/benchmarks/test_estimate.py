"""``python -m benchmarks.estimate``: the estimator against simpler methods, on any recorded jobs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.estimate.command import main
from benchmarks.estimate.evaluation import (
    ALL_CALLS,
    AS_IN_USE,
    CLASSES_ONLY,
    ENDED_ONLY,
    ESTIMATOR,
    HELD_OUT,
    LEARNED,
    PER_TOOL,
    WATCHED,
    Evaluation,
    Protocol,
)
from benchmarks.estimate.scores import Comparison, Scores
from eval.load.records import JobRecord, TurnRecord
from tests.eval.workloads.jobs import SHARED, written

COMMANDS = {"ls": 0.05, "git": 0.1, "pip": 4.0, "pytest": 20.0}
"""Shell programs and their usual seconds, all in one tool."""


def made_jobs(num_jobs: int = 24, num_calls: int = 12) -> list[dict[str, Any]]:
    """Jobs of two per group, each with its own speed, that end with an answer."""
    return [_made_job(index, num_calls, random.Random(f"made {index}")) for index in range(num_jobs)]


def _made_job(index: int, num_calls: int, rng: random.Random) -> dict[str, Any]:
    speed = rng.lognormvariate(0, 0.7)
    turns = [_made_turn(number, speed, rng) for number in range(num_calls)]
    known = 400 * num_calls
    last = {"input_tokens": known + 300, "prefix_tokens": known, "output_tokens": 100, "gap_kind": "end"}
    return {"job_id": f"job{index}", "source": "made", "group": f"group{index // 2}", "turns": [*turns, last]}


def _made_turn(number: int, speed: float, rng: random.Random) -> dict[str, Any]:
    names = rng.sample(sorted(COMMANDS), 2 if number % 5 == 0 else 1)
    seconds = [round(COMMANDS[name] * speed * rng.lognormvariate(0, 0.2), 3) for name in names]
    return {
        "input_tokens": 400 * number + 300,
        "prefix_tokens": 400 * number,
        "output_tokens": 100,
        "gap_kind": "tool",
        "tool": "Bash",
        "tool_s": max(seconds),
        "calls": [{"tool": "Bash", "cmd": name, "s": s} for name, s in zip(names, seconds, strict=True)],
    }


def estimated(tmp_path: Path, workload: Path, *flags: str) -> Evaluation:
    """Runs the command; returns the evaluation that it wrote."""
    out = tmp_path / "out" / "estimate.json"
    assert main(["--workload", str(workload), "--json", str(out), *flags]) == 0
    return msgspec.json.decode(out.read_bytes(), type=Evaluation)


def protocol(evaluation: Evaluation, name: str) -> Protocol:
    return next(one for one in evaluation.protocols if one.name == name)


def scores(protocol: Protocol, name: str) -> Scores:
    return next(one for one in protocol.scores if one.name == name)


def against(protocol: Protocol, name: str) -> Comparison:
    return next(one for one in protocol.comparisons if one.baseline == name)


@pytest.mark.slow
def test_classes_and_jobs_are_worth_knowing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If one tool runs programs of all durations, and jobs have their own speeds, the estimator loses less
    than quantiles per tool, and less with a job's history than without. It is calibrated within each program,
    unlike the tool's quantiles. The table reports this and the source of the times."""
    evaluation = estimated(tmp_path, written(tmp_path / "jobs.jsonl", *made_jobs()), "--no-learned")
    held_out = protocol(evaluation, HELD_OUT)
    assert (evaluation.num_jobs, evaluation.num_groups, held_out.num_calls) == (24, 12, evaluation.num_calls)
    for rival in (PER_TOOL, CLASSES_ONLY):
        assert against(held_out, rival).pinball_s.high < 0
    assert against(held_out, PER_TOOL).calibration_error_by_program.high < 0
    assert scores(held_out, ESTIMATOR).calibration_error_by_program.value < 0.1
    assert list(scores(held_out, ESTIMATOR).ended_by) == [str(round(0.05 * n, 2)) for n in range(1, 20)]
    assert evaluation.parallel is not None
    assert evaluation.parallel.num_turns == 24 * 3
    printed, progress = capsys.readouterr()
    for expected in (
        "predicted tool times",
        "held-out groups",
        "as in use",
        "bash/pytest",
        "last turn, Brier score",
        "microseconds",
        "tool times: 288 measured",
    ):
        assert expected in printed
    assert max(map(len, printed.splitlines())) <= 115
    assert f"estimate: {HELD_OUT}: {PER_TOOL}\n" in progress


@pytest.mark.slow
def test_what_still_runs_counts(tmp_path: Path) -> None:
    """Ignoring calls that still run makes long ones look rare; the estimator counts them, so its highest
    quantiles are better calibrated."""
    evaluation = estimated(tmp_path, written(tmp_path / "jobs.jsonl", *made_jobs(40)), "--no-learned")
    watched = protocol(evaluation, WATCHED)
    aware, unaware = scores(watched, ESTIMATOR), scores(watched, ENDED_ONLY)
    assert unaware.ended_by["0.95"] < aware.ended_by["0.95"] <= 0.97


def test_nothing_is_known_before_it_ended(tmp_path: Path) -> None:
    """A call is predicted only from calls that ended before it began: of two successive jobs the second one
    uses the first, of two concurrent ones neither does."""
    for second_s, num_skipped in ((1000.0, 1), (0.001, 2)):
        jobs = made_jobs(12, num_calls=1)
        for job, arrival_s in zip(jobs, (0.0, second_s, *range(10_000, 20_000, 1000)), strict=True):
            job["arrival_s"] = arrival_s
            job["turns"][0]["calls"] = job["turns"][0]["calls"][:1]
        evaluation = estimated(tmp_path, written(tmp_path / "jobs.jsonl", *jobs), "--no-learned")
        assert protocol(evaluation, AS_IN_USE).num_skipped == num_skipped


@pytest.mark.slow
def test_what_follows_a_turn(tmp_path: Path) -> None:
    """Turns with a call continue and answers end: P(last turn) is far better than the base rate, and constant
    prompt growth is learned. The notes say that the end by an answer is assumed."""
    evaluation = estimated(tmp_path, written(tmp_path / "jobs.jsonl", *made_jobs()), "--no-learned")
    turns = evaluation.turns
    assert (turns.num_turns, turns.num_last, turns.num_followed) == (24 * 13, 24, 24 * 12)
    assert turns.brier_ratio is not None
    assert turns.log_loss_ratio is not None
    assert turns.brier_ratio.high < 0.1
    assert turns.log_loss_ratio.high < 0.5
    assert [end.share_last for end in turns.ends] == [0.0, 1.0]
    assert turns.growth_told_mean_tokens == pytest.approx(300, rel=0.01)
    assert any("ASSUMED" in note for note in turns.notes)


@pytest.mark.slow
def test_a_learned_correction_is_a_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parallel calls take longer here, which the estimator cannot know. The correction lowers the log loss;
    the table shows it and the time of a correction."""
    jobs = made_jobs(16)
    for job in jobs:
        for turn in job["turns"]:
            for call in turn.get("calls", []):
                call["s"] *= 6 if len(turn["calls"]) > 1 else 1
    evaluation = estimated(tmp_path, written(tmp_path / "jobs.jsonl", *jobs), "--folds", "2")
    held_out = protocol(evaluation, HELD_OUT)
    (compared,) = (one for one in held_out.comparisons if one.name == LEARNED)
    assert compared.baseline == ESTIMATOR
    assert compared.pinball_log_ratio is not None
    assert compared.pinball_log_ratio.high < 0.97
    assert scores(held_out, LEARNED).pinball_log.value < scores(held_out, ESTIMATOR).pinball_log.value
    timing = evaluation.timing
    assert timing.answer_corrected is not None
    assert timing.answer_corrected.median > timing.answer.median
    assert "estimator + learned / estimator: 0." in capsys.readouterr().out


@pytest.mark.slow
def test_same_seed_same_bytes(tmp_path: Path) -> None:
    """Two runs differ only in their durations; another seed gives other folds."""
    workload = written(tmp_path / "jobs.jsonl", *made_jobs(8))
    runs = [estimated(tmp_path, workload, "--no-learned", "--seed", seed) for seed in ("1", "1", "2")]
    first, second, other = (
        msgspec.json.encode(msgspec.structs.replace(run, timing=runs[0].timing)) for run in runs
    )
    assert first == second
    assert runs[0].protocols[0] != runs[2].protocols[0]
    assert other != first


def test_records_of_an_earlier_run(tmp_path: Path) -> None:
    """Records of ``bench`` are a workload: its gaps are the times, and each job is a group."""
    lines: list[str] = []
    for number in range(6):
        for turn in (1, 2, 3):
            lines.append(
                msgspec.json.encode(
                    TurnRecord(
                        job_id=f"job{number}",
                        turn=turn,
                        start_s=10.0 * number + turn,
                        prompt_tokens=100 * turn,
                        output_tokens=10,
                        tool="bash" if turn < 3 else None,
                        command="make" if turn < 3 else None,
                        gap_s=0.5 + 0.01 * number if turn < 3 else None,
                    )
                ).decode()
            )
        job = JobRecord(
            job_id=f"job{number}",
            start_s=10.0 * number,
            end_s=10.0 * number + 5,
            num_turns=3,
            num_planned_turns=3,
            num_recorded_turns=3,
        )
        lines.append(msgspec.json.encode(job).decode())
    evaluation = estimated(tmp_path, written(tmp_path / "records.jsonl", *lines))
    assert (evaluation.num_calls, evaluation.num_groups) == (12, 6)
    assert any("an earlier run waited" in note for note in evaluation.notes)
    assert any("no correction was learned: a fold leaves" in note for note in evaluation.notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda job: job["turns"][0].update(gap_kind="user", tool=None, tool_s=None, calls=None), ""),
        (lambda job: job.update(group="one"), "All jobs are of one group"),
    ],
)
def test_what_cannot_be_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    """A file without tool times, or with one group only, is refused in one sentence, exit code 1."""
    jobs = made_jobs(4, num_calls=1)
    for job in jobs:
        change(job)
    workload = written(tmp_path / "jobs.jsonl", *jobs)
    assert main(["--workload", str(workload), "--no-learned"]) == 1
    printed, complaint = capsys.readouterr()
    assert not printed
    expected = told or f"The workload {workload} has no tool times: there is nothing to predict."
    assert complaint.startswith(f"error: {expected}")


def test_more_jobs_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs are not duplicated: a copy would be predicted from its original."""
    workload = written(tmp_path / "jobs.jsonl", *made_jobs(4))
    assert main(["--workload", str(workload), "--jobs", "5"]) == 2
    assert "--jobs asks for 5 jobs" in capsys.readouterr().err


def test_no_place_for_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unwritable output is refused before the work is done."""
    workload = written(tmp_path / "jobs.jsonl", *made_jobs(4))
    assert main(["--workload", str(workload), "--json", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: Cannot write the result {tmp_path}: Is a directory.\n"


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the recorded workloads are not beside the repository")
def test_recorded_agent(tmp_path: Path) -> None:
    """On unseen calls of a real coding agent the estimator beats one distribution for all and one per tool,
    in pinball loss and in calibration within programs, by more than chance."""
    evaluation = estimated(tmp_path, SHARED / "agentcgroup-claude.jsonl", "--no-learned", "--folds", "5")
    held_out = protocol(evaluation, HELD_OUT)
    assert held_out.num_calls > 1500
    for rival in (ALL_CALLS, PER_TOOL):
        compared = against(held_out, rival)
        assert compared.pinball_s.high < 0
        assert compared.pinball_log.high < 0
        assert compared.calibration_error_by_program.high < 0
    ours = scores(held_out, ESTIMATOR)
    assert ours.calibration_error.value < 0.03
    for level in ("0.5", "0.9", "0.95"):
        assert ours.ended_by[level] == pytest.approx(float(level), abs=0.03)
    assert json.loads((tmp_path / "out" / "estimate.json").read_bytes())["schema_version"] == 1
