"""The arithmetic of a result, on records made by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.messages import TurnReceipt
from eval.metrics import Distribution, summarise
from eval.records import JobRecord, TurnRecord, recomputed_tokens, write_records
from eval.server_metrics import ServerMetrics

BEFORE = """
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{model_name="m",engine="0"} 3
# TYPE continuum:pins_ended counter
continuum:pins_ended_total{model_name="m",engine="0",cause="handed_over"} 5
continuum:pins_ended_total{model_name="m",engine="0",cause="expired"} 2
"""
AFTER = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m",engine="0"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{model_name="m",engine="0"} 4
# TYPE continuum:pins gauge
continuum:pins{model_name="m",engine="0"} 1
# TYPE continuum:pins_ended counter
continuum:pins_ended_total{model_name="m",engine="0",cause="handed_over"} 9
continuum:pins_ended_total{model_name="m",engine="0",cause="expired"} 2
continuum:pins_ended_total{model_name="m",engine="0",cause="broken"} 1
"""


def _turn(job_id: str, turn: int, *, ttft_s: float, prompt: int = 100, cached: int = 0) -> TurnRecord:
    return TurnRecord(
        job_id=job_id,
        turn=turn,
        start_s=float(turn),
        latency_s=ttft_s + 1,
        ttft_s=ttft_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=10,
        as_recorded=True,
    )


def _job(job_id: str, start_s: float, end_s: float, error: str | None = None) -> JobRecord:
    return JobRecord(
        job_id=job_id,
        start_s=start_s,
        end_s=end_s,
        num_turns=2,
        num_planned_turns=2,
        num_recorded_turns=3 if job_id == "b" else 2,
        error=error,
    )


@pytest.mark.parametrize(
    ("prompt", "cached", "expected"),
    [
        (400, 200, 20),  # 220 shared, 200 of them found
        (400, 224, 0),  # more was found than this job had: another job's prefix
        (400, 0, 220),  # nothing was kept
        (150, 96, 54),  # the prompt was cut: no more can be shared than there is
    ],
)
def test_recomputed_is_what_the_previous_turn_had_and_the_cache_did_not(
    prompt: int, cached: int, expected: int
) -> None:
    """Of the previous turn's 200 prompt and 20 output tokens, those that the cache did not give back."""
    previous = _turn("a", 1, ttft_s=1.0, prompt=200)
    previous.output_tokens = 20
    assert recomputed_tokens(previous, prompt, cached) == expected


def test_a_first_turn_recomputes_nothing() -> None:
    """What was never computed cannot be recomputed."""
    assert recomputed_tokens(None, 5000, 0) == 0


def test_a_distribution_of_nothing_is_none_and_of_something_is_exact() -> None:
    """Percentiles interpolate; a mean of nothing is not zero."""
    assert Distribution.of([]) is None
    found = Distribution.of(float(x) for x in range(101))
    assert found == Distribution(count=101, mean=50.0, p50=50.0, p95=95.0, p99=99.0, max=100.0)


def test_a_replay_is_summed_up() -> None:
    """First and returning turns are apart, failed turns count as errors only, counters are differences."""
    pinned = _turn("a", 1, ttft_s=2.0)
    pinned.receipt = TurnReceipt(request_id="r", job_id="a", turn=1, ttl_s=3.0)
    returned = _turn("a", 2, ttft_s=0.5, prompt=150, cached=96)
    returned.recomputed_tokens = 14
    unlike = _turn("b", 1, ttft_s=4.0)
    unlike.as_recorded = False
    failed = TurnRecord(job_id="b", turn=2, start_s=9.0, error="HTTP 500")
    jobs = [_job("a", 1.0, 5.0), _job("b", 0.0, 9.0, error="HTTP 500")]
    before, after = ServerMetrics.parse(BEFORE), ServerMetrics.parse(AFTER)

    result = summarise("x", "m", jobs, [pinned, returned, unlike, failed], before, after, ["note"])

    assert (result.num_jobs, result.num_completed_jobs, result.num_cut_jobs) == (2, 1, 1)
    assert (result.num_turns, result.num_errors, result.num_unlike_recording) == (3, 1, 1)
    assert result.wall_s == 9.0
    assert result.job_completion_s is not None
    assert (result.job_completion_s.count, result.job_completion_s.mean) == (1, 4.0)
    assert result.first_ttft_s is not None
    assert (result.first_ttft_s.mean, result.first_ttft_s.max) == (3.0, 4.0)
    assert result.returning_ttft_s is not None
    assert (result.returning_ttft_s.count, result.returning_ttft_s.p99) == (1, 0.5)
    tokens = (result.prompt_tokens, result.cached_tokens, result.recomputed_tokens, result.output_tokens)
    assert tokens == (350, 96, 14, 30)
    assert result.num_preemptions == 1
    assert result.num_pinned_turns == 1
    assert result.pins_ended == {"broken": 1, "handed_over": 4}
    assert result.kv_usage_at_end == 0.25


def test_gauges_tell_whether_a_server_is_idle() -> None:
    """First and returning turns are apart, failed turns are only errors, counters are differences."""
    assert ServerMetrics.parse(AFTER).idle
    assert ServerMetrics.parse(AFTER).kv_usage == 0.25
    assert ServerMetrics.parse(AFTER).pins == 1
    assert not ServerMetrics.parse(AFTER.replace('waiting{model_name="m",engine="0"} 0', "waiting 2")).idle


def test_a_series_that_a_server_lacks_is_unknown_not_zero() -> None:
    """Another engine's metrics leave our numbers empty."""
    other = ServerMetrics.parse("# TYPE up gauge\nup 1\n")
    assert (other.pins, other.kv_usage, other.pins_ended) == (None, None, {})
    assert other.preemptions_since(other) is None


def test_records_are_lines_in_order_of_start(tmp_path: Path) -> None:
    """Each line is one turn that reads back equal; the folder is made if need be."""
    late, early = _turn("a", 7, ttft_s=1.0), _turn("b", 1, ttft_s=2.0)
    path = tmp_path / "deep" / "records.jsonl"
    write_records(path, [late, early])
    read = [msgspec.json.decode(line, type=TurnRecord) for line in path.read_bytes().splitlines()]
    assert read == [early, late]
