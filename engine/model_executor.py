"""Who runs the model: named here, so that whoever only sends the name elsewhere loads nothing of it."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.executor import Executor


def model_executor(config: EngineConfig) -> Executor:
    """The model in the core's own process, or in processes of its own. Imported there: a front end stays free
    of torch."""
    if config.model.tensor_parallel_size > 1:
        from engine.worker.ranks.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(config)
    from engine.worker.executor import UniProcExecutor

    return UniProcExecutor(config)
