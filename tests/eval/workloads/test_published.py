"""Synthetic jobs have the published moments, whatever else is assumed."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.errors import WorkloadError
from eval.workloads.catalog import open_workload
from eval.workloads.checks import complaint_about
from eval.workloads.job import GapKind, Job
from eval.workloads.published import PRESETS
from eval.workloads.tool_times import ToolMix, ToolShape
from tests.eval.workloads.jobs import SHARED

NUM_JOBS = 3000


def made(name: str, num_jobs: int, seed: int = 0) -> list[Job]:
    """The jobs of this synthetic workload."""
    return open_workload(name).sample(num_jobs, seed).jobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "turns", "tool_s", "tokens"),
    [
        # arXiv 2511.02230 (v6), table 2: mean and standard deviation.
        ("swe-bench", (10.9, 2.1), (0.925, 3.550), (70_126, 19_732)),
        ("bfcl", (6.3, 2.3), (1.923, 2.133), (93_256, 68_687)),
    ],
)
def test_made_jobs_have_the_published_moments(
    name: str, turns: tuple[float, float], tool_s: tuple[float, float], tokens: tuple[float, float]
) -> None:
    """Turns, tool times and tokens have means within 3 % and standard deviations within 10 %."""
    jobs = made(name, NUM_JOBS)
    gaps = [turn.gap_s for job in jobs for turn in job.turns if turn.gap_s is not None]
    for values, (mean, sd) in (
        ([float(len(job.turns)) for job in jobs], turns),
        (gaps, tool_s),
        ([float(job.max_context_tokens) for job in jobs], tokens),
    ):
        assert statistics.fmean(values) == pytest.approx(mean, rel=0.03)
        assert statistics.stdev(values) == pytest.approx(sd, rel=0.10)


def test_made_tool_times_have_a_long_tail_and_tools_differ() -> None:
    """Four of five calls take under a second; the slowest tenth has most of the time; a test suite takes many
    times as long as a grep."""
    calls = [call for job in made("swe-bench", 1000) for turn in job.turns for call in turn.calls]
    seconds = sorted(call.seconds for call in calls if call.seconds is not None)
    assert sum(value < 1 for value in seconds) > 0.8 * len(seconds)
    assert sum(seconds[-len(seconds) // 10 :]) > 0.6 * sum(seconds)
    median = {
        command: statistics.median(call.seconds or 0.0 for call in calls if call.command == command)
        for command in ("grep", "pytest")
    }
    assert median["pytest"] > 10 * median["grep"]


@pytest.mark.slow
def test_more_turns_are_as_large_as_before() -> None:
    """With four times the turns of the same size the context grows; tokens can be scaled down."""
    plain, long, small = (
        made(name, 500) for name in ("swe-bench", "swe-bench:turns=4", "swe-bench:turns=4,tokens=0.25")
    )
    for job, longer, smaller in zip(plain, long, small, strict=True):
        assert len(longer.turns) == len(smaller.turns) == 4 * len(job.turns)
    added = [
        statistics.fmean(turn.output_tokens for job in jobs for turn in job.turns) for jobs in (plain, long)
    ]
    assert added[1] == pytest.approx(added[0], rel=0.02)
    contexts = [statistics.fmean(job.max_context_tokens for job in jobs) for jobs in (plain, long, small)]
    assert contexts[1] == pytest.approx(4 * contexts[0], rel=0.05)
    assert contexts[2] == pytest.approx(contexts[0], rel=0.05)


@given(name=st.sampled_from(sorted(PRESETS)), seed=st.integers(0, 2**32), num_jobs=st.integers(1, 5))
def test_made_jobs_are_legal_and_depend_on_their_seed_only(name: str, seed: int, num_jobs: int) -> None:
    """Equal arguments give equal jobs, more jobs do not change the first ones, and every prompt contains the
    whole previous turn."""
    jobs = made(name, num_jobs, seed)
    assert made(name, num_jobs + 1, seed)[:num_jobs] == jobs
    assert made(name, num_jobs, seed + 1) != jobs
    for job in jobs:
        assert complaint_about(job) is None
        for before, turn in zip(job.turns, job.turns[1:], strict=False):
            assert turn.prefix_tokens == before.input_tokens + before.output_tokens
            assert before.gap_kind is GapKind.TOOL
            assert before.gap_s is not None
            assert not before.gap_measured


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the recorded workloads are not beside the repository")
def test_made_tools_have_the_recorded_shapes() -> None:
    """exp(mu) and sigma are those fitted to the recording, per tool."""
    fits = json.loads((SHARED / "tool_latency_quantiles.json").read_text())["agentcgroup-claude"]
    stands_for = {
        "cat": fits["tool"]["Read"],
        "sed": fits["tool"]["Edit"],
        None: fits["tool"]["Edit"],
        "pytest": fits["bash_program"]["python -m pytest"],
        "go test": fits["bash_program"]["python -m pytest"],
        "go build": fits["bash_program"]["pip"],
    }
    for preset in (PRESETS["swe-bench"], PRESETS["openhands"]):
        for shape in preset.shapes:
            fit = stands_for.get(shape.command) or fits["bash_program"][shape.command]
            recorded = (fit["lognormal_mu"], fit["lognormal_sigma"])
            assert (math.log(shape.median_s), shape.sigma) == pytest.approx(recorded), shape


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("swe-bench:turn=2", "swe-bench takes turns=X and tokens=X, not 'turn=2'"),
        ("bfcl:turns=0", "turns must be more than 0 and at most 1000, not '0'"),
        ("bfcl:tokens=many", "tokens must be more than 0 and at most 1000, not 'many'"),
        ("bfcl:turns=inf", "turns must be more than 0 and at most 1000, not 'inf'"),
        ("bfcl:turns=1e9", "turns must be more than 0 and at most 1000, not '1e9'"),
        ("bfcl:turns=2,turns=3", "turns is given twice"),
        ("swebench", "Cannot read the workload swebench: No such file"),
    ],
)
def test_a_wrong_parameter_is_refused(name: str, complaint: str) -> None:
    """A misspelled parameter does not silently run something else."""
    with pytest.raises(WorkloadError, match=complaint):
        open_workload(name)


def test_scaled_jobs_say_how_they_can_be_asked_for_again() -> None:
    """A workload's name contains its scales."""
    assert made("bfcl:tokens=0.4", 1)[0].source == "bfcl:tokens=0.4"
    assert open_workload("bfcl:turns=1").name == "bfcl"


@pytest.mark.slow
@given(
    mean_s=st.floats(0.1, 5.0),
    variation=st.floats(0.5, 4.0),
    medians=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=4),
)
def test_any_mix_of_tools_comes_to_its_moments(mean_s: float, variation: float, medians: list[float]) -> None:
    """For any shapes of the tools, all calls together have the requested mean and spread."""
    shapes = [ToolShape("tool", str(n), 1.0, median_s, 1.0) for n, median_s in enumerate(medians)]
    # A mix whose medians alone spread more than requested cannot be narrowed.
    own = statistics.pstdev(medians) / statistics.fmean(medians)
    mix = ToolMix.fit(shapes, mean_s, mean_s * max(variation, own * 1.1), timeout_s=400.0)
    assert mix.mean_s == pytest.approx(mean_s, rel=1e-6)
    assert mix.sd_s == pytest.approx(mean_s * max(variation, own * 1.1), rel=1e-2)
