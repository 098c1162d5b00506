"""A model folder, its tokenizer and engines over a stand-in model, for the tests of the front end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.executor import ExecutorFactory
from engine.llm import engine_config
from engine.llm_engine import LLMEngine
from engine.policy import fcfs
from engine.testing import FakeExecutorFactory
from engine.tokenizer import Tokenizer
from engine.worker.tiny_models import make_model_folder

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(ModelConfig(model=str(model_folder)))


@pytest.fixture
def make_engine(model_folder: Path) -> Iterator[MakeEngine]:
    """Engines in this process, on a stand-in model; options as for ``LLM``."""
    engines: list[LLMEngine] = []

    def make(executor_factory: ExecutorFactory | None = None, **options: object) -> LLMEngine:
        config = engine_config(str(model_folder), **{"num_gpu_blocks_override": 300} | options)
        engines.append(LLMEngine(config, executor_factory or FakeExecutorFactory(), fcfs, multiprocess=False))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
