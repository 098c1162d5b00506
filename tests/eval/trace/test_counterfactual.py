"""``continuum trace replay --policy``: a trace's jobs under another policy, next to what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.report.metrics import RunResult
from eval.report.results import read_results

JOBS = ["--workload", "swe-bench:tokens=0.3", "--rate", "1", "--max-turns", "10"]
SCARCE = ["--kv-tokens", "20000", "--max-num-batched-tokens", "512"]


def _simulated(folder: Path, policy: str, num_jobs: int = 12) -> tuple[Path, RunResult]:
    """Returns a trace and the result of its run."""
    trace, results = folder / f"{policy}.jsonl", folder / f"{policy}.json"
    flags = ["--policies", policy, "--jobs", str(num_jobs), "--trace", str(trace), "--json", str(results)]
    assert main(["simulate", *JOBS, *SCARCE, *flags]) == 0
    return trace, read_results(results).runs[0]


@pytest.fixture(scope="module")
def continuum(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    return _simulated(tmp_path_factory.mktemp("traces"), "continuum")


def _asked(trace: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["trace", "replay", str(trace), *flags]) == 0
    return capsys.readouterr().out


def _figures(table: str, label: str) -> list[float]:
    """The values of a line of the table, one per column, without ratios."""
    line = next(line for line in table.splitlines() if line.startswith(label))
    values = [word for word in line[len(label) :].replace(" k", "000").split() if not word.endswith("x")]
    return [float(value.replace(",", "")) for value in values]


@pytest.mark.slow
def test_what_was_recorded_is_told_as_it_was(
    continuum: tuple[Path, RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace alone gives the figures of its run; simulating its policy gives about the same."""
    trace, run = continuum
    table = _asked(trace, capsys, "--policy", "fcfs")
    assert run.job_completion_s is not None
    again, _, recorded = _figures(table, "job completion, mean s")
    assert recorded == pytest.approx(run.job_completion_s.mean, rel=0.01)
    assert again == pytest.approx(recorded, rel=0.15)
    assert _figures(table, "turns answered") == [run.num_turns] * 3
    assert _figures(table, "preemptions")[2] == run.num_preemptions
    assert _figures(table, "  recomputed")[2] == pytest.approx(run.recomputed_tokens, rel=0.02)
    assert run.held_in_vain_token_s is not None
    wasted = _figures(table, "KV pinned but wasted, token-s")[2]
    assert wasted == pytest.approx(run.held_in_vain_token_s, abs=1000)
    for cause, number in run.pins_ended.items():
        if cause != "released":  # Others are released when all jobs have ended.
            assert _figures(table, f"  pins {cause.replace('_', ' ')}")[2] == number


@pytest.mark.slow
def test_another_policy_has_the_same_jobs_and_another_outcome(
    continuum: tuple[Path, RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """The output states the assumption that step times are the trace's own."""
    table = _asked(continuum[0], capsys, "--policy", "fcfs")
    again, other, recorded = _figures(table, "  recomputed")
    assert other > 2 * max(again, recorded)
    assert _figures(table, "prompt tokens")[0] == _figures(table, "prompt tokens")[1]
    assert "continuum again" in table
    for told in ("fitted to", "ASSUMED: the time from the end of a turn", "measured, not simulated"):
        assert told in " ".join(table.split())


@pytest.mark.slow
def test_a_policy_without_jobs_leaves_a_trace_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients had named the jobs of an fcfs run, so continuum can be simulated on it."""
    trace, run = _simulated(tmp_path, "fcfs", num_jobs=24)
    table = _asked(trace, capsys, "--policy", "continuum")
    assert _figures(table, "jobs completed") == [24, 24, 24]
    assert _figures(table, "turns answered") == [run.num_turns] * 3
    again, other, _ = _figures(table, "  recomputed")
    assert other < again / 2


@pytest.mark.slow
def test_the_same_policy_on_the_same_hardware_is_what_was_recorded(
    continuum: tuple[Path, RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """Outcomes of pins and held memory are as in the trace; they are the base of all ratios."""
    hardware = ("--model", "llama-3.1-8b", "--gpu", "h100")
    table = _asked(continuum[0], capsys, "--policy", "fcfs", *hardware)
    for cause in ("revoked", "expired", "handed over"):
        again, _, recorded = _figures(table, f"  pins {cause}")
        assert again == recorded > 0
    again, _, recorded = _figures(table, "KV pinned but wasted, token-s")
    assert again == pytest.approx(recorded, rel=0.02)  # It adds the time between client and engine.
    again, _, recorded = _figures(table, "  recomputed")
    assert again == pytest.approx(recorded, rel=0.02)


@pytest.mark.slow
def test_hardware_may_be_named_instead(
    continuum: tuple[Path, RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    table = _asked(continuum[0], capsys, "--policy", "fcfs", "--model", "llama-3.1-8b", "--gpu", "h200")
    assert "COMPUTED for llama-3.1-8b in bf16 on h200" in " ".join(table.split())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policy", "lifo"], "Unknown policy 'lifo'; choose from fcfs"),
        (["--gpu", "h200"], "--gpu has no effect without --policy"),
        (
            ["--policy", "fcfs", "--tensor-parallel", "4"],
            "--tensor-parallel has no effect without --model",
        ),
        (["--policy", "fcfs", "--tensor-parallel", "4", "--profile", "x"], "have no effect with --profile"),
        (["--policy", "fcfs", "--gpu", "h200"], "--model and --gpu need each other"),
        (["--policy", "fcfs", "--gpu", "h200", "--profile", "x"], "have no effect with --profile"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    continuum: tuple[Path, RunResult], flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has exit code 2 and no traceback."""
    capsys.readouterr()
    assert main(["trace", "replay", str(continuum[0]), *flags]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_too_few_steps_tell_no_cost(
    continuum: tuple[Path, RunResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says which options help."""
    content = continuum[0].read_bytes().splitlines(keepends=True)
    ended = next(place for place, line in enumerate(content) if b'"ended":' in line)
    (tmp_path / "trace.jsonl").write_bytes(b"".join(content[: ended + 1]))
    capsys.readouterr()
    assert main(["trace", "replay", str(tmp_path / "trace.jsonl"), "--policy", "fcfs"]) == 1
    assert "give --profile, or --model and --gpu, to say what a step costs." in capsys.readouterr().err
