"""Agents whose contexts grow a hundredfold: the eight turns of a published study, short of memory.

The study is hungchun0201/agentic-ai-survey, 1.3 of its bottleneck analysis. The published ``fork`` rule was
better than ``continuum`` here until admission knew how contexts grow.
"""

from __future__ import annotations

import json

import pytest

from continuum.cli.main import main
from eval.report.metrics import RunResult
from eval.report.results import read_results

PROMPTS = (92, 1840, 3449, 6025, 7454, 10299, 12333, 13193)
"""Tokens of the eight prompts."""
OUTPUT = 20
TOOL_S = 0.5
NUM_JOBS = 120


def _turn(number: int) -> dict[str, object]:
    last = number == len(PROMPTS) - 1
    prefix = PROMPTS[number - 1] + OUTPUT if number else 0
    return {
        "input_tokens": PROMPTS[number],
        "prefix_tokens": prefix,
        "output_tokens": OUTPUT,
        "gap_kind": "end" if last else "tool",
        "tool": None if last else "tool",
        "tool_s": None if last else TOOL_S,
        "calls": [] if last else [{"tool": "tool", "s": TOOL_S}],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """Each policy's run: six jobs a second on an eighth of the memory that they need."""
    folder = tmp_path_factory.mktemp("eight")
    jobs = [
        {"job_id": f"job{job}", "source": "study", "turns": [_turn(number) for number in range(len(PROMPTS))]}
        for job in range(NUM_JOBS)
    ]
    workload = folder / "jobs.jsonl"
    workload.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    flags = ["--workload", str(workload), "--rate", "6", "--kv-tokens", "200000", "--max-num-seqs", "1024"]
    flags += ["--max-num-batched-tokens", "8192", "--policies", "fcfs,fork,continuum"]
    assert main(["simulate", *flags, "--json", str(folder / "out.json")]) == 0
    return {run.name: run for run in read_results(folder / "out.json").runs}


def _mean_s(run: RunResult) -> float:
    assert run.job_completion_s is not None
    return run.job_completion_s.mean


def _return_p99_s(run: RunResult) -> float:
    assert run.returning_ttft_s is not None
    return run.returning_ttft_s.p99


@pytest.mark.slow
def test_jobs_that_grow_are_done_as_soon_as_under_the_published_rule(runs: dict[str, RunResult]) -> None:
    """The mean is within a tenth of the rule's, and less than half of first come, first served."""
    assert _mean_s(runs["continuum"]) < 1.1 * _mean_s(runs["fork"])
    assert _mean_s(runs["continuum"]) < 0.5 * _mean_s(runs["fcfs"])


@pytest.mark.slow
def test_returning_turns_wait_less_than_under_either(runs: dict[str, RunResult]) -> None:
    """Jobs wait before they begin, and not at each turn."""
    assert _return_p99_s(runs["continuum"]) < 0.5 * _return_p99_s(runs["fork"])
    assert _return_p99_s(runs["continuum"]) < 0.5 * _return_p99_s(runs["fcfs"])


@pytest.mark.slow
def test_hardly_a_pin_is_revoked_whose_turn_is_back_in_half_a_second(runs: dict[str, RunResult]) -> None:
    """Its computation would cost the others more than a short wait for it. Answers are not held either, once
    it is known that nothing follows them."""
    ends = runs["continuum"].pins_ended
    assert ends["revoked"] < 0.1 * ends["handed_over"]
    assert ends["expired"] < 0.25 * NUM_JOBS
