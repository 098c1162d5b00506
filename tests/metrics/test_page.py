"""The page for Prometheus: prometheus_client's own text, whatever has changed since the last one."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.frontend.stats import FinishedRequestStats, IterationStats
from engine.metrics import shared_page
from engine.metrics.metrics import Metrics
from engine.metrics.page import Page
from engine.metrics.shared_page import SAVED_S, SHARE, SharedPage
from engine.records.reported_stats import BlockLives, JobEnd, JobStats, LoRAStats, SchedulerStats

MODEL = 'a "quoted" model\\ 1'


def by_the_library(page: Page) -> bytes:
    """The page as prometheus_client writes all of it."""
    registry = CollectorRegistry()
    for family in page.families:
        registry.register(family)
    return generate_latest(registry)


def draw_stats(random: Random) -> SchedulerStats:
    """Statistics of a step in which some things happen."""
    stats = SchedulerStats(
        num_running_reqs=random.randrange(3),
        num_preemptions=random.randrange(2),
        prefix_cache_queries=random.choice((0, 0, 7)),
        pins_ended=random.choice(({}, {"expired": 2}, {"reused": 1})),
        pin_held_s=random.choice(({}, {"expired": [1.5, 0.01]})),
        step_tokens=random.randrange(200),
    )
    if random.random() < 0.3:
        stats.jobs = JobStats(num_jobs=4, ended=[JobEnd("finished", 12.0, random.random(), 4)])
    if random.random() < 0.2:
        stats.block_lives = BlockLives(lifetimes_s=[3.0])
    if random.random() < 0.3:
        stats.lora = LoRAStats(max_loras=2, running=[random.choice(("sql@1", "chat@1"))])
    return stats


def draw_iteration(random: Random, now: float, engine: int) -> IterationStats:
    """What an API server sees of that step."""
    finished = FinishedRequestStats("stop", 5, 2, 3, None, random.random(), 0.0, 0.1, 0.2, 0.3, 0.2)
    return IterationStats(
        now,
        engine=engine,
        num_generation_tokens=random.randrange(2),
        inter_token_latencies_s=random.choice(([], [0.02] * 3)),
        finished_requests=[finished] * random.randrange(2),
    )


@pytest.mark.parametrize("num_cores", [1, 2])
def test_the_page_is_the_librarys(num_cores: int) -> None:
    """Labels begin and end, numbers move or stay: the page is that of prometheus_client after each step."""
    random = Random(num_cores)
    page = Page()
    cores = [Metrics(page, MODEL, 4096, 2, engine_index=index) for index in range(num_cores)]
    for core in cores:
        core.record_pool(16, 300)
    assert page.exposition() == by_the_library(page)
    for step in range(60):
        index = random.randrange(num_cores)
        cores[index].record(draw_stats(random), draw_iteration(random, float(step), index))
        if random.random() < 0.2:
            cores[0].record_rejection(random.choice(("queue", "memory")))
        if random.random() < 0.7:
            assert page.exposition() == by_the_library(page)


def test_a_page_without_news_is_not_written_again() -> None:
    page = Page()
    core = Metrics(page, "m", 4096)
    core.record(SchedulerStats(num_running_reqs=1), IterationStats(1.0))
    first = page.exposition()
    core.record(SchedulerStats(num_running_reqs=1), IterationStats(2.0))
    assert page.exposition() is first
    core.record(SchedulerStats(num_running_reqs=2), IterationStats(3.0))
    assert page.exposition() != first


class Folder:
    """Files that take ``COST_S`` to add up, by a clock of its own, and how often they were."""

    COST_S = 0.02

    def __init__(self) -> None:
        self.now = 1000.0
        self.times: list[float] = []

    def add_up(self, _registry: object) -> bytes:
        self.now += self.COST_S
        self.times.append(self.now)
        return str(len(self.times)).encode()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Folder:
    """What the pages of these tests add up."""
    folder = Folder()
    monkeypatch.setattr(shared_page, "monotonic", lambda: folder.now)
    monkeypatch.setattr(shared_page, "generate_latest", folder.add_up)
    return folder


def test_many_scrapes_of_several_processes_take_a_share_of_a_core(tmp_path: Path, folder: Folder) -> None:
    """Twenty a second for two minutes: after what was saved up, one in two seconds is new."""
    page = SharedPage(tmp_path)

    async def scrape() -> None:
        begin = folder.now
        while folder.now < begin + 120:
            await page.exposition()
            folder.now += 0.05

    asyncio.run(scrape())
    spent = len(folder.times) * folder.COST_S
    assert 120 * SHARE * 0.9 < spent < (120 + SAVED_S) * SHARE * 1.1
    late = [time for time in folder.times if time > folder.times[0] + 60]
    assert max(after - before for before, after in pairwise(late)) < 2.2


def test_scrapes_by_hand_get_a_new_page_and_those_at_once_share_one(tmp_path: Path, folder: Folder) -> None:
    page = SharedPage(tmp_path)

    async def scrape() -> list[bytes]:
        by_hand = [await page.exposition() for _ in range(3)]
        return [*by_hand, *await asyncio.gather(*(page.exposition() for _ in range(5)))]

    assert asyncio.run(scrape()) == [b"1", b"2", b"3"] + [b"4"] * 5
