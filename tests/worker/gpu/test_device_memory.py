"""The GPU memory of steps is measured, tested with a model of torch's allocator, which keeps freed memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.worker import profile_run
from engine.worker.gpu import backend
from engine.worker.loading.loader import load_model
from engine.worker.parallel.group import ALONE
from tests.worker.conftest import ModelFolders
from tests.worker.gpu.device_engine import spec_of

pytestmark = pytest.mark.slow

TOTAL, PEAK, GRAPHS = 1000, 300, 20


@dataclass(slots=True)
class Memory:
    """The memory of a GPU."""

    graphs: int = 0
    kept: int = 0
    """Freed, but kept by the allocator."""

    def available(self, _: torch.device) -> int:
        return TOTAL - self.graphs - self.kept

    def give_back(self) -> None:
        self.kept = 0


class Path:
    """Steps that use ``PEAK``, and graphs."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def warm_up(self) -> None:
        self._memory.kept = max(self._memory.kept, PEAK)

    def capture(self) -> None:
        self._memory.give_back()  # as ``torch.cuda.graph`` does when it is entered
        self._memory.graphs += GRAPHS


def test_both_graphs_and_the_peak_of_steps_are_counted(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    monkeypatch.setattr(torch.cuda, "empty_cache", memory.give_back)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(profile_run, "available_bytes", memory.available)
    monkeypatch.setattr(backend, "GPUBackend", lambda *_: Path(memory))
    loaded = load_model(ModelConfig(model=str(model_folders("qwen3")), device="cpu", max_model_len=20))
    config = EngineConfig(model=ModelConfig(model=""), cache=CacheConfig(block_size=4))
    taken = profile_run.measure_gpu_steps(loaded, spec_of(loaded, block_size=4), config, ALONE)
    assert taken == PEAK + GRAPHS
