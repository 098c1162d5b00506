"""Agents whose contexts grow a hundredfold: the eight turns of a published study, short of memory.

The published ``fork`` rule was better than ``continuum`` here until admission knew how contexts grow.
"""

from __future__ import annotations

import pytest

from continuum.cli.main import main
from eval.report.metrics import RunResult
from eval.report.results import read_results

NUM_JOBS = 120


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """Each policy's run: six jobs a second on an eighth of the memory that they need."""
    out = tmp_path_factory.mktemp("eight") / "out.json"
    flags = ["--workload", "eight-turns", "--jobs", str(NUM_JOBS), "--rate", "6", "--kv-tokens", "200000"]
    flags += ["--max-num-seqs", "1024", "--max-num-batched-tokens", "8192"]
    flags += ["--policies", "fcfs,fork,continuum"]
    assert main(["simulate", *flags, "--json", str(out)]) == 0
    return {run.name: run for run in read_results(out).runs}


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
