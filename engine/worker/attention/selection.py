"""Which backend attends over a pool: the compiled one where it can be had, plain torch everywhere else."""

from __future__ import annotations

import logging

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.cpu_kernel import CpuKernel
from engine.worker.attention.cpu_paged import CpuPagedAttention
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.kernels.library import KernelUnavailable

logger = logging.getLogger(__name__)


def select_attention(pool: torch.Tensor, wanted: str) -> AttentionBackend:
    """The backend for a pool. ``wanted``: see ``ModelConfig.attention_backend``. Never fails."""
    if wanted == "torch" or pool.device.type != "cpu":
        logger.info("Attention: torch.")
        return TorchPagedAttention(pool)
    try:
        kernel = CpuKernel.load(pool.shape[-1], pool.dtype)
    except KernelUnavailable as error:
        logger.warning("Attention: torch, for want of the compiled kernel: %s.", error)
        return TorchPagedAttention(pool)
    logger.info("Attention: the kernel compiled for this CPU.")
    return CpuPagedAttention(pool, kernel)
