"""The table of metrics: each row reads a field of its record, and every recorded metric is exported."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest

from engine.frontend.stats import IterationStats
from engine.metrics.metric import Kind, Metric
from engine.metrics.server_metrics import ServerMetrics
from engine.metrics.table import TABLE
from engine.records.reported_stats import BlockLives, JobEnd, JobStats, SchedulerStats, SpecDecodingStats

READ_BY_NAME = [metric for metric in TABLE if isinstance(metric.read, str)]


@pytest.mark.parametrize("metric", READ_BY_NAME, ids=lambda metric: metric.name)
def test_a_row_reads_a_field_that_there_is(metric: Metric) -> None:
    source = metric.source
    assert source is not None
    fields = (
        {field.name for field in dataclasses.fields(source)}
        if dataclasses.is_dataclass(source)
        else {field.name for field in msgspec.structs.fields(source)}
    )
    properties = {name for name in dir(source) if isinstance(getattr(source, name), property)}
    assert metric.read in fields | properties


def test_names_are_those_of_one_metric() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)


def test_each_metric_has_a_source_or_is_recorded_by_name() -> None:
    """Each row has a source or is recorded by name; otherwise it would stay 0 for ever."""
    by_name = {metric.name for metric in TABLE if metric.source is None}
    assert by_name == {
        "continuum:dashboard_viewers",
        "vllm:admission_rejections",
        "continuum:prefix_killers_removed",
        "continuum:continued_prompts",
        "vllm:mm_cache_queries",
        "vllm:mm_cache_hits",
        "continuum:key_requests",
        "continuum:key_prompt_tokens",
        "continuum:key_output_tokens",
        "continuum:key_computed_tokens",
    }
    assert all((metric.source is None) == (metric.read is None) for metric in TABLE)
    assert all(metric.buckets == () for metric in TABLE if metric.kind is not Kind.HISTOGRAM)


def test_what_two_cores_report_is_exported_by_core() -> None:
    metrics = ServerMetrics(2, "tiny", 4096, num_speculative_tokens=2)
    jobs = JobStats(num_jobs=3, ended=[JobEnd("finished", 12.0, 1.0, 4)])
    first = SchedulerStats(num_running_reqs=5, num_preemptions=2, pins_ended={"expired": 4}, jobs=jobs)
    metrics.record(first, IterationStats(1.0, engine=0, num_prompt_tokens=7))
    lives = BlockLives(lifetimes_s=[3.0])
    drafts = SpecDecodingStats(1, 2, 1, [1])
    metrics.record(SchedulerStats(block_lives=lives, spec_decoding=drafts), IterationStats(2.0, engine=1))
    metrics.record(None, IterationStats(3.0, engine=0, inter_token_latencies_s=[0.2, 0.4]))
    page = asyncio.run(metrics.exposition()).decode()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="tiny"} 5.0',
        'vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0',
        'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 7.0',
        'continuum:pins_ended_total{cause="expired",engine="0",model_name="tiny"} 4.0',
        'continuum:jobs{engine="0",model_name="tiny"} 3.0',
        'continuum:job_turns_sum{engine="0",model_name="tiny"} 4.0',
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 2.0',
        'vllm:kv_block_lifetime_seconds_sum{engine="1",model_name="tiny"} 3.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="tiny",position="0"} 1.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="tiny",position="1"} 0.0',
    ):
        assert line in page.splitlines(), line
    assert 'vllm:kv_block_lifetime_seconds_sum{engine="0",model_name="tiny"}' not in page
