"""FlashAttention-3, if installed: the full package, or the small wheel with its forward kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from engine.worker.gpu.prompt_paths.path import AttentionKind, Prompts

FULL = ("flash_attn_interface", "flash_attn_config")
FORWARD_ONLY = ("fa3_fwd_interface", "fa3_fwd_config")


class FlashAttention3:
    """A DenseKernel."""

    name = "FlashAttention-3"

    def __init__(self, function: Callable[..., Any], build_flags: dict[str, bool]) -> None:
        """``build_flags``: true for each feature that the build disables; features not named are not used."""
        self._function = function
        self._has_window = not build_flags.get("FLASHATTENTION_DISABLE_LOCAL", True)
        self._has_soft_cap = not build_flags.get("FLASHATTENTION_DISABLE_SOFTCAP", True)

    @classmethod
    def find(cls, interface: str, config: str) -> FlashAttention3:
        """Import it. ``interface``: the module of its functions; ``config``: that of its build flags. Raises
        what importing them raises."""
        try:
            flags = import_module(config).CONFIG["build_flags"]
        except ImportError:
            flags = {}
        return cls(import_module(interface).flash_attn_varlen_func, flags)

    def can(self, kind: AttentionKind) -> bool:
        return (kind.window is None or self._has_window) and (kind.soft_cap is None or self._has_soft_cap)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        result: torch.Tensor | tuple[torch.Tensor, ...] = self._function(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=prompts.query_starts,
            cu_seqlens_k=prompts.kv_starts,
            max_seqlen_q=prompts.max_query_len,
            max_seqlen_k=prompts.max_seq_len,
            softmax_scale=kind.scale,
            causal=True,
            window_size=(-1, -1) if kind.window is None else (kind.window - 1, 0),
            softcap=kind.soft_cap or 0.0,
        )
        # Early releases return the log-sum-exp too.
        return result if isinstance(result, torch.Tensor) else result[0]
