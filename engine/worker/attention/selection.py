"""Chooses the attention backend of a pool: the fastest that works here, otherwise plain torch."""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec

import torch

from engine.config.engine_config import CacheConfig, EngineConfig
from engine.errors import ConfigError
from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.layer_places import LayerPlaces
from engine.worker.attention.mixed_heads import over_pool
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.paged_attention import CpuPagedAttention
from engine.worker.gpu.ops import uses_triton

logger = logging.getLogger(__name__)

FIRST_WITH_FP8 = (8, 9)
"""Compute capability of the first GPUs that convert fp8 numbers (PTX ISA, cvt)."""


def resolve_attention(config: EngineConfig, device: torch.device) -> str:
    """Resolve ``attention_backend`` on this device: ``triton``, ``torch`` or, on a CPU, still ``auto``.

    ConfigError if it is unavailable, or does not support the other options.
    """
    wanted = config.model.attention_backend
    if wanted == "triton":
        _check_triton(device)
    elif wanted == "auto" and device.type == "cuda":
        wanted = "triton" if _has_triton() else "torch"
        if wanted == "torch":
            logger.warning("Using torch attention; for Triton: pip install 'continuum-engine[gpu]'.")
    if config.cache.kv_cache_dtype != "auto":
        _check_storage(config.cache.kv_cache_dtype, wanted, device)
    if not config.model.disable_cascade_attn and wanted != "triton":
        raise ConfigError(
            f"disable_cascade_attn=False needs attention_backend triton, but it is {wanted} here."
        )
    if config.model.enable_return_routed_experts and wanted == "triton":
        raise ConfigError("enable_return_routed_experts is not supported with attention_backend triton yet.")
    return wanted


def _check_triton(device: torch.device) -> None:
    if not _has_triton():
        raise ConfigError("attention_backend=triton needs Triton: pip install 'continuum-engine[gpu]'.")
    if not uses_triton(device):
        raise ConfigError(
            f"attention_backend=triton on {device.type} needs Triton's interpreter, which is slow and for "
            "tests only: set TRITON_INTERPRET=1 in the environment."
        )


def _check_storage(kv_cache_dtype: str, resolved: str, device: torch.device) -> None:
    if resolved != "triton":
        raise ConfigError(
            f"kv_cache_dtype={kv_cache_dtype} needs attention_backend triton, but it is {resolved} here."
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_FP8:
        raise ConfigError(
            f"kv_cache_dtype={kv_cache_dtype} needs a GPU of compute capability "
            f"{'.'.join(map(str, FIRST_WITH_FP8))} or later."
        )


def _has_triton() -> bool:
    return find_spec("triton") is not None


def storage_dtype(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of K and V in the pool, for a model of ``dtype``."""
    return torch.float8_e4m3fn if cache.kv_cache_dtype == "fp8_e4m3" else dtype


def select_attention(
    pool: torch.Tensor, resolved: str, places: LayerPlaces | None = None
) -> AttentionBackend:
    """Return the CPU backend's attention. ``resolved``: from ``resolve_attention``, and not triton.
    ``places``: by default, the layers are one KV cache group. Never fails."""
    return over_pool(pool, places, partial(_select, resolved))


def _select(resolved: str, pool: torch.Tensor, places: LayerPlaces | None) -> AttentionBackend:
    """``select_attention`` of layers with the same heads."""
    if resolved == "torch" or pool.device.type != "cpu":
        logger.info("Using torch attention.")
        return TorchPagedAttention(pool, places)
    try:
        kernel = CpuKernel.load(pool.shape[-1], pool.dtype)
    except KernelUnavailable as error:
        logger.warning("CPU kernels unavailable (%s): using torch attention.", error)
        return TorchPagedAttention(pool, places)
    if pool.shape[2] == 1 and not kernel.has_prefill:
        logger.info("Using torch attention: this CPU has no kernel for latents.")
        return TorchPagedAttention(pool, places)
    logger.info("Using the compiled CPU attention kernel.")
    return CpuPagedAttention(pool, kernel, places)
