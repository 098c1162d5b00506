"""Messages that a rank receives besides its steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.core.outputs import NO_MASKS, CachedRequestData, SchedulerOutput
from engine.worker.ranks import rank_proc
from engine.worker.ranks.rank_messages import RankPlace, RankStart, StepPlan
from engine.worker.ranks.rank_proc import Inbox


@contextmanager
def inbox_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection[Any, Any], Inbox]]:
    """A rank's inbox, and the core's end of its channel."""
    left = threading.Event()
    monkeypatch.setattr(rank_proc, "exit_process", lambda _: left.set())
    monkeypatch.setattr(rank_proc, "STOP_GRACE_S", 0.0)
    core, channel = Pipe()
    config = EngineConfig(model=ModelConfig(model=""))
    try:
        place = RankPlace(rank, 2, rank, 2, "")
        yield core, Inbox(RankStart(config, place, channel.fileno(), os.getppid(), 0), channel)
    finally:
        core.close()
        assert left.wait(timeout=5)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_waits_for_masks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not use masks waits, too: else its device would wait for the first rank's tokens."""
    with inbox_of(rank, monkeypatch) as (core, inbox):
        core.send(StepPlan(SchedulerOutput([], CachedRequestData(), {}, 0, set(), set()), has_masks=True))
        plan = inbox.next_order()
        assert isinstance(plan, SchedulerOutput)
        assert plan.masks is not None
        assert not plan.masks.done()
        core.send(NO_MASKS)
        assert not plan.masks.result(timeout=5).req_ids
