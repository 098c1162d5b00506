"""Engines over a stand-in model, for the tests of the frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.policy import fcfs
from engine.executor import ExecutorFactory
from engine.frontend.llm import engine_config
from engine.frontend.llm_engine import LLMEngine
from engine.testing import FakeExecutorFactory

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def make_engine(model_folder: Path) -> Iterator[MakeEngine]:
    """Makes engines in this process, on a stand-in model; takes the options of ``LLM``."""
    engines: list[LLMEngine] = []

    def make(executor_factory: ExecutorFactory | None = None, **options: object) -> LLMEngine:
        config = engine_config(str(model_folder), **{"num_gpu_blocks_override": 300} | options)
        engines.append(LLMEngine(config, executor_factory or FakeExecutorFactory(), fcfs, multiprocess=False))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
