"""What computes steps that the host waits for, put together over one pool."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.worker.attention.selection import select_attention
from engine.worker.host_pool import HostTransfers
from engine.worker.input_batch import InputBatch
from engine.worker.loader import LoadedModel
from engine.worker.model_runner import ModelRunner
from engine.worker.models.compiled_decoder import with_compiled_steps
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.parallel.rank_sampler import select_sampler
from engine.worker.step_runner import RunnerInCall, RunnerInThread, StepRunner


class HostPath:
    """A StepPath: the only one on a CPU, and what is left to a GPU without Triton."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: torch.Tensor,
        backend: str,
        config: EngineConfig,
        group: TensorParallelGroup,
    ) -> None:
        """``backend``: by ``resolve_attention``."""
        self._loaded = loaded
        self._config = config
        self._group = group
        self.attention = select_attention(pool, backend)

    def runner(self, host_pool: HostTransfers | None) -> StepRunner:
        loaded, config = self._loaded, self._config
        batch = InputBatch(
            config.scheduler.max_num_seqs, loaded.max_model_len, config.cache.block_size, loaded.vocab_size
        )
        runner = ModelRunner(
            with_compiled_steps(loaded.model, self.attention),
            self.attention,
            batch,
            select_sampler(config.model.seed, self._group),
            loaded.device,
            host_pool,
        )
        ahead = config.scheduler.plans_ahead(loaded.device.type != "cpu")
        return RunnerInThread(runner) if ahead else RunnerInCall(runner)
