"""The default executor factory. A process that only sends it to the core imports no torch."""

from __future__ import annotations

import os

from engine.config.engine_config import EngineConfig
from engine.config.parallel import cores_sharing_experts, ranks_per_core
from engine.executor import Executor


def model_executor(config: EngineConfig) -> Executor:
    """Run the model in the core's process, or in one process per rank. Imports torch only when called."""
    if config.parallel.num_local > 1:
        from engine.worker.engine_share import take_share

        take_share(config)  # before torch counts cores and devices
    if cores_sharing_experts(config) > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its store complains of each core that ends
    if config.model.distributed_executor_backend == "ray":
        from engine.worker.ranks.ray_executor import RayExecutor

        return RayExecutor(config)
    if ranks_per_core(config) > 1:
        from engine.worker.ranks.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(config)
    if cores_sharing_experts(config) > 1:
        from engine.worker.ranks.rank_model import load_lone_rank

        return load_lone_rank(config)
    from engine.worker.executor import UniProcExecutor
    from engine.worker.memory import share_host_memory

    share_host_memory(config.parallel.num_local)
    return _encoder(config) or UniProcExecutor(config)


def _encoder(config: EngineConfig) -> Executor | None:
    """The executor of a model whose tokens attend to all others; None for decoders."""
    from engine.worker.pooling.pooling_folder import read_pooling_folder

    if read_pooling_folder(config.model.model, config.pooling) is None:
        return None
    from engine.worker.pooling.encoder_executor import encoder_executor  # imports transformers

    return encoder_executor(config)
