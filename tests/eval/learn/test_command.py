"""``continuum learn``: recordings and traces become a file that simulated and real servers start from."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from continuum.cli.main import main
from estimator.state import load_learned
from eval.report.results import read_results
from tests.estimator.learned.made_jobs import LONG, SHORT, made_job
from tests.eval.workloads.jobs import written
from tracing.events import JobEvent, TraceHeader
from tracing.reader import read_trace


def _recording(folder: Path, numbers: range, name: str = "jobs.jsonl") -> Path:
    """Writes alternating long and short jobs, each in its own group."""
    jobs = []
    for number in numbers:
        for tool in (LONG, SHORT):
            turns, known = [], 0
            facts = made_job(number, tool).turns
            for place, turn in enumerate(facts):
                is_last = place == len(facts) - 1
                turns.append(
                    {
                        "input_tokens": known + turn.num_new_tokens,
                        "prefix_tokens": known,
                        "output_tokens": turn.num_output_tokens,
                        "gap_kind": "end" if is_last else "tool",
                        **({} if is_last else {"tool": tool, "tool_s": turn.num_output_tokens / 200}),
                    }
                )
                known += turn.num_new_tokens + turn.num_output_tokens
            jobs.append({"job_id": f"{tool}{number}", "source": "made", "group": f"{number}", "turns": turns})
    return written(folder / name, jobs)


def test_what_was_learned_orders_jobs_of_other_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short jobs, recognized by their tools, go first: the mean falls, and the trace has the reason."""
    learned, results, trace = tmp_path / "learned.json", tmp_path / "r.json", tmp_path / "t.jsonl"
    assert main(["learn", str(_recording(tmp_path, range(10))), "--out", str(learned)]) == 0
    told = capsys.readouterr()
    assert "learned from 20 jobs" in told.out
    assert "correctly" in told.out
    assert "the loss in ln s is 0." in told.out
    assert "fitting a model of 20 jobs" in told.err
    others = _recording(tmp_path, range(20, 30), "others.jsonl")
    flags = ["simulate", "--workload", str(others), "--arrivals", "at-once", "--kv-tokens", "60000"]
    flags += ["--max-num-seqs", "2"]
    policies = f"continuum,continuum:estimator_state={learned}"
    assert main([*flags, "--policies", policies, "--json", str(results)]) == 0
    by_age, by_work = [run.job_completion_s for run in read_results(results).runs]
    assert by_age is not None
    assert by_work is not None
    assert by_work.mean < 0.9 * by_age.mean

    one = f"continuum:estimator_state={learned}"
    assert main([*flags, "--policies", one, "--trace", str(trace)]) == 0
    header, *events = read_trace(trace)
    assert isinstance(header, TraceHeader)
    assert "work_model" in (header.estimator_state or "")
    predicted: dict[str, list[float]] = {LONG: [], SHORT: []}
    for event in events:
        if isinstance(event, JobEvent) and event.predicted_excess_s is not None:
            predicted[event.job_id[: -len("20")]].append(event.predicted_excess_s)
    assert min(predicted[LONG]) < max(predicted[LONG]), "it is predicted at each turn anew"
    assert mean(predicted[LONG]) > 0 >= max(predicted[SHORT])
    capsys.readouterr()
    assert main(["trace", "replay", str(trace)]) == 0
    assert main(["trace", "explain", str(trace), f"{SHORT}25"]) == 0
    explained = " ".join(capsys.readouterr().out.split())
    assert "was predicted to take" in explained
    assert "learned correction of that time, factor " in explained, "long answers to tools take longer here"


def test_a_trace_teaches_as_the_recording_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The jobs of a server's own trace give the same tools and, up to one block, the same work."""
    trace, learned = tmp_path / "t.jsonl", tmp_path / "learned.json"
    workload = _recording(tmp_path, range(6))
    simulated = ["simulate", "--workload", str(workload), "--policies", "continuum", "--trace", str(trace)]
    assert main([*simulated, "--lessons"]) == 0
    assert main(["learn", str(trace), str(workload), "--out", str(learned)]) == 0
    assert "learned from 24 jobs" in capsys.readouterr().out
    model = load_learned(learned).work_model
    assert model is not None
    assert model.num_jobs == 24
    assert set(model.tools) == {LONG.lower(), SHORT.lower()}, "as the core names them"
    assert main(["trace", "replay", str(trace)]) == 0, (
        "a model that came in the course of the run is an input"
    )
    kinds = [json.loads(line).get("kind") for line in trace.read_text().splitlines()]
    assert kinds.count("model_learned") == 1


def test_few_jobs_teach_tools_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With too few jobs no model is made, and the output says so."""
    learned = tmp_path / "learned.json"
    assert main(["learn", str(_recording(tmp_path, range(2))), "--out", str(learned)]) == 0
    told = capsys.readouterr().out
    assert "no model of remaining work: that takes 8 jobs" in told
    assert "no correction of durations: that takes 100 of them" in told
    learned_little = load_learned(learned)
    assert (learned_little.work_model, learned_little.duration_model) == (None, None)


@pytest.mark.parametrize(
    ("source", "out", "code", "told"),
    [
        ("missing.jsonl", "x.json", 1, "missing.jsonl"),
        ("jobs.jsonl", "jobs.jsonl", 1, "--out are the same file"),
        ("jobs.jsonl", ".", 1, "Cannot write"),
    ],
)
def test_bad_input_is_one_sentence(
    source: str, out: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input gives one sentence, and no input is overwritten."""
    jobs = _recording(tmp_path, range(4))
    before = jobs.read_bytes()
    assert main(["learn", str(tmp_path / source), "--out", str(tmp_path / out)]) == code
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("continuum: ")
    assert jobs.read_bytes() == before
