"""The arithmetic of a result, on hand-made records."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.records.messages import TurnReceipt
from eval.errors import ResultError
from eval.load.records import EngineCounters, Occupancy, TurnRecord, recomputed_tokens
from eval.load.server_metrics import ServerMetrics
from eval.report.metrics import MAX_DETAIL_JOBS, MAX_DETAIL_SAMPLES, RunSetting, summarize
from eval.report.results import ResultFile, read_results, write_results
from eval.trace.analysis.distribution import Distribution
from tests.eval.hand_made import job, run, turn

SETTING = RunSetting(name="fcfs", model="m", workload="w", seed=3)

BEFORE = """
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{model_name="m",engine="0"} 3
# TYPE continuum:pins_ended counter
continuum:pins_ended_total{model_name="m",engine="0",cause="handed_over"} 5
continuum:pins_ended_total{model_name="m",engine="0",cause="expired"} 2
# TYPE continuum:pin_block_seconds counter
continuum:pin_block_seconds_total{model_name="m",engine="0",cause="expired"} 10.5
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
continuum:pins_ended_total{model_name="m",engine="0",cause="revoked"} 1
# TYPE continuum:pin_block_seconds counter
continuum:pin_block_seconds_total{model_name="m",engine="0",cause="expired"} 10.5
continuum:pin_block_seconds_total{model_name="m",engine="0",cause="handed_over"} 30
continuum:pin_block_seconds_total{model_name="m",engine="0",cause="revoked"} 2.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="101",engine="0"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="51",engine="1"} 1
"""


@pytest.mark.parametrize(
    ("prompt", "cached", "expected"),
    [
        (400, 200, 20),  # 220 shared, 200 of them found.
        (400, 224, 0),  # More was found than this job had: another job's prefix.
        (400, 0, 220),  # Nothing was kept.
        (150, 96, 54),  # The prompt was cut, so no more can be shared than it has.
    ],
)
def test_recomputed_is_what_the_previous_turn_had_and_the_cache_did_not(
    prompt: int, cached: int, expected: int
) -> None:
    """Recomputed are those of the previous turn's 200 prompt and 20 output tokens that were not cached."""
    previous = turn("a", 1, 0.0, prompt_tokens=200)
    previous.output_tokens = 20
    assert recomputed_tokens(previous, prompt, cached) == expected


def test_a_first_turn_recomputes_nothing() -> None:
    """A first turn has nothing to recompute."""
    assert recomputed_tokens(None, 5000, 0) == 0


def test_a_distribution_of_nothing_is_none_and_of_something_is_exact() -> None:
    """Percentiles are interpolated; without values the mean is None, not zero."""
    assert Distribution.of([]) is None
    found = Distribution.of(float(x) for x in range(101))
    assert found == Distribution(count=101, mean=50.0, p50=50.0, p95=95.0, p99=99.0, max=100.0)


def test_a_run_is_summed_up() -> None:
    """First and returning turns are separate; failed turns count as errors only."""
    pinned = turn("a", 1, 1.0, 2.0, receipt=TurnReceipt(request_id="r", job_id="a", turn=1, ttl_s=3.0))
    returned = turn("a", 2, 4.0, 0.5, prompt_tokens=150, cached_tokens=96, recomputed_tokens=14)
    unlike = turn("b", 1, 0.0, 4.0, as_recorded=False)
    failed = TurnRecord(job_id="b", turn=2, start_s=9.0, error="HTTP 500")
    jobs = [job("a", 1.0, 5.0), job("b", 0.0, 10.0, error="HTTP 500")]
    jobs[1].num_recorded_turns = 3
    counters = EngineCounters(num_preemptions=1, kv_usage_at_end=0.25, host_tokens_loaded=64)

    result = summarize(SETTING, jobs, [pinned, returned, unlike, failed], counters, notes=["note"])

    assert (result.name, result.notes) == ("fcfs", ["note"])
    assert (result.num_jobs, result.num_completed_jobs, result.num_cut_jobs) == (2, 1, 1)
    assert (result.num_turns, result.num_errors, result.num_unlike_recording) == (3, 1, 1)
    assert (result.wall_s, result.jobs_per_hour) == (10.0, 360.0)
    assert result.job_completion_s == Distribution(count=1, mean=4.0, p50=4.0, p95=4.0, p99=4.0, max=4.0)
    assert result.ttft_s is not None
    assert (result.ttft_s.count, result.ttft_s.p50, result.ttft_s.max) == (3, 2.0, 4.0)
    assert result.first_ttft_s is not None
    assert (result.first_ttft_s.mean, result.first_ttft_s.max) == (3.0, 4.0)
    assert result.returning_ttft_s is not None
    assert (result.returning_ttft_s.count, result.returning_ttft_s.p99) == (1, 0.5)
    tokens = (result.prompt_tokens, result.cached_tokens, result.recomputed_tokens, result.output_tokens)
    assert tokens == (350, 96, 14, 30)
    assert result.hit_rate == 96 / 350
    assert result.output_tokens_per_s == 3.0
    assert (result.num_preemptions, result.host_tokens_loaded, result.kv_usage_at_end) == (1, 64, 0.25)
    assert result.num_pinned_turns == 1
    assert result.jobs == [jobs[1], jobs[0]]


def test_goodput_counts_turns_within_the_limit_and_their_tokens() -> None:
    """Of TTFTs of 1, 3 and 5 s over 10 s, two are within 3 s: the limit itself counts as good."""
    turns = [turn("a", i, 0.0, ttft_s, output_tokens=10 * i) for i, ttft_s in ((1, 1.0), (2, 3.0), (3, 5.0))]
    result = summarize(SETTING, [job("a", 0.0, 10.0)], turns, EngineCounters(), ttft_limit_s=3.0)
    assert (result.ttft_limit_s, result.goodput_turns_per_s, result.goodput_tokens_per_s) == (3.0, 0.2, 3.0)
    assert result.output_tokens_per_s == 6.0


def test_the_longest_wait_is_in_the_queue_where_the_run_tells() -> None:
    """A simulation reports the queue; for a server only the first token is known."""
    jobs = [job("a", 0.0, 10.0)]
    seen = [turn("a", 1, 0.0, 5.0, queued_s=1.5), turn("a", 2, 6.0, 2.0, queued_s=0.25)]
    assert summarize(SETTING, jobs, seen, EngineCounters()).longest_wait_s == 1.5
    unseen = [turn("a", 1, 0.0, 5.0), turn("a", 2, 6.0, 2.0)]
    assert summarize(SETTING, jobs, unseen, EngineCounters()).longest_wait_s == 5.0


def test_memory_held_for_nothing_is_what_no_turn_took_over() -> None:
    """30 block-seconds expired and 10 were revoked, of 16 tokens each: 640 token-seconds, of 16,000."""
    held = {"handed_over": 500.0, "expired": 30.0, "revoked": 10.0}
    counters = EngineCounters(block_size=16, num_blocks=100, pin_block_s=held)
    result = summarize(SETTING, [job("a", 0.0, 10.0)], [], counters)
    assert (result.held_in_vain_token_s, result.held_in_vain_share) == (640.0, 0.04)
    unknown = summarize(SETTING, [job("a", 0.0, 10.0)], [], EngineCounters(pin_block_s=held))
    assert (unknown.held_in_vain_token_s, unknown.held_in_vain_share) == (None, None)


def test_computed_prefill_is_the_engines_count_where_it_keeps_one() -> None:
    """Without an engine's count, prefill is the prompt minus cached tokens, from the server's usage."""
    turns, jobs = [turn("a", 1, 0.0, cached_tokens=64)], [job("a", 0.0, 10.0)]
    assert summarize(SETTING, jobs, turns, EngineCounters()).computed_prefill_tokens == 36
    counted = EngineCounters(computed_prefill_tokens=50)
    assert summarize(SETTING, jobs, turns, counted).computed_prefill_tokens == 50


def test_a_run_of_nothing_has_no_rates() -> None:
    """Nothing is divided by zero, and unknown values are not zero."""
    result = summarize(SETTING, [], [], EngineCounters())
    rates = (result.jobs_per_hour, result.output_tokens_per_s, result.goodput_turns_per_s, result.hit_rate)
    assert rates == (None, None, None, None)
    assert (result.longest_wait_s, result.job_completion_s, result.ttft_s) == (None, None, None)


def test_detail_is_bounded_and_from_the_middle_of_the_run() -> None:
    """For a run of any length a plot gets some jobs in full and a few hundred samples; without detail
    none."""
    jobs = [job(f"j{i:03}", float(i), i + 5.0) for i in range(100)]
    turns = [turn(each.job_id, 1, each.start_s, 2.0, queued_s=0.5) for each in jobs]
    many = Occupancy(time_s=[float(i) for i in range(1200)], free=list(range(1200)))
    result = summarize(SETTING, jobs, turns, EngineCounters(), occupancy=many, detail=True)
    assert [span.job_id for span in result.spans] == [f"j{i:03}" for i in range(35, 65)]
    assert len(result.spans) == MAX_DETAIL_JOBS
    first = result.spans[0]
    assert (first.start_s, first.wait_s, first.end_s, first.tool) == (35.0, 0.5, 38.0, "bash")
    assert result.occupancy is not None
    assert len(result.occupancy.time_s) <= MAX_DETAIL_SAMPLES
    assert result.occupancy.free[1] == result.occupancy.time_s[1] == 3
    plain = summarize(SETTING, jobs, turns, EngineCounters(), occupancy=many)
    assert (plain.spans, plain.occupancy, len(plain.jobs)) == ([], None, 100)


def test_counters_of_a_server_are_differences_between_two_readings() -> None:
    """Two engines of 100 and 50 usable blocks are summed; unchanged counters are left out."""
    counters = ServerMetrics.parse(AFTER).counters_since(ServerMetrics.parse(BEFORE))
    assert counters.num_preemptions == 1
    assert counters.pins_ended == {"revoked": 1, "handed_over": 4}
    assert counters.pin_block_s == {"revoked": 2.5, "handed_over": 30.0}
    assert (counters.block_size, counters.num_blocks, counters.kv_usage_at_end) == (16, 150, 0.25)


def test_the_same_runs_leave_the_same_bytes_and_read_back_equal(tmp_path: Path) -> None:
    """A result contains no clock time or host name, and does not depend on the order of its counters."""
    paths = [tmp_path / "deep" / name for name in ("a.json", "b.json")]
    for path, pins in zip(paths, ({"expired": 1, "revoked": 2}, {"revoked": 2, "expired": 1}), strict=True):
        runs = [run("fcfs", 10.0, counters=EngineCounters(pins_ended=pins)), run("oracle", 5.0)]
        write_results(path, ResultFile(title="t", command="simulate", notes=["n"], runs=runs))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(paths[0].read_bytes().splitlines()) == 4
    assert read_results(paths[0]).runs == runs
    write_results(paths[0], ResultFile())
    assert read_results(paths[0]) == ResultFile()


def test_an_older_result_has_todays_names(tmp_path: Path) -> None:
    """Old results call revoked pins broken."""
    path = tmp_path / "old.json"
    pins = EngineCounters(pins_ended={"revoked": 2, "expired": 1})
    write_results(path, ResultFile(runs=[run("fcfs", 10.0, counters=pins)]))
    written = path.read_bytes()
    path.write_bytes(written.replace(b'"revoked"', b'"broken"'))
    assert path.read_bytes() != written
    assert read_results(path).runs[0].pins_ended == {"revoked": 2, "expired": 1}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "Cannot read the result"),
        (b"{}", "is not a result of `--json`"),
        (b'{"schema_version":99,"runs":[]}', "has schema version 99"),
        (b'{"schema_version":1,"runs":[{}]}', "is not a complete result"),
        (b'{"schema_version":1,"runs":[', "is cut short or not JSON"),
        (b"\x00not json", "is cut short or not JSON"),
        (b'{"schema_version":1,"runs":[],"title":"\xff"}', "is not a complete result"),
    ],
)
def test_a_file_that_is_no_result_is_one_sentence(tmp_path: Path, content: bytes | None, told: str) -> None:
    """The error names the file and the fault."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultError, match=r"x\.json.*\.$") as caught:
        read_results(path)
    assert told in str(caught.value)


def test_gauges_tell_whether_a_server_is_idle() -> None:
    """A server is idle if nothing runs or waits, as far as it reports."""
    assert ServerMetrics.parse(AFTER).idle
    assert ServerMetrics.parse(AFTER).kv_usage == 0.25
    assert ServerMetrics.parse(AFTER).pins == 1
    assert not ServerMetrics.parse(AFTER.replace('waiting{model_name="m",engine="0"} 0', "waiting 2")).idle


def test_a_series_that_a_server_lacks_is_unknown_not_zero() -> None:
    """Metrics of another engine leave our figures unknown."""
    other = ServerMetrics.parse("# TYPE up gauge\nup 1\n")
    assert (other.pins, other.kv_usage, other.pins_ended) == (None, None, {})
    assert other.preemptions_since(other) is None
