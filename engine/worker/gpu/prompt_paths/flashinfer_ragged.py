"""FlashInfer, if installed. It plans on the host, once per step and kind of layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch

from engine.worker.gpu.prompt_paths.path import AttentionKind, Prompts
from engine.worker.gpu.streams import Mark, streams_of

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 128 * 2**20
"""The workspace size that its documentation recommends."""


@dataclass(slots=True)
class _Planned:
    """A FlashInfer wrapper, and the prompts of its current plan."""

    wrapper: Any
    prompts: Prompts | None = None
    sent: Mark | None = None
    """A mark after the copy of the plan to the device; the next plan reuses the host memory of that copy."""


class FlashInferRagged:
    """A DenseKernel."""

    name = "FlashInfer"

    def __init__(self, wrapper_class: type[Any], device: torch.device) -> None:
        self._wrapper_class = wrapper_class
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._streams = streams_of(device)
        self._planned: dict[AttentionKind, _Planned] = {}

    @classmethod
    def find(cls, device: torch.device) -> FlashInferRagged:
        """Import it. Raises what the import raises."""
        wrapper_class = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
        logger.info("FlashInfer may compile kernels at first use, which takes minutes.")
        return cls(wrapper_class, device)

    def can(self, kind: AttentionKind) -> bool:
        return True

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        planned = self._planned.get(kind)
        if planned is None:
            planned = self._planned[kind] = _Planned(self._wrapper_class(self._workspace, "NHD"))
        if planned.prompts is not prompts:
            if planned.sent is not None:
                planned.sent.synchronize()
            _plan(planned.wrapper, query, key, prompts, kind)
            planned.prompts, planned.sent = prompts, self._streams.mark()
        output: torch.Tensor = planned.wrapper.run(query, key, value)
        return output


def _plan(
    wrapper: Any, query: torch.Tensor, key: torch.Tensor, prompts: Prompts, kind: AttentionKind
) -> None:
    """Plan with the lengths on the host, which FlashInfer would otherwise fetch from the device."""
    wrapper.plan(
        qo_indptr=_starts(chunk.query_len for chunk in prompts.chunks),
        kv_indptr=_starts(chunk.seq_len for chunk in prompts.chunks),
        num_qo_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim_qk=query.shape[2],
        causal=True,
        sm_scale=kind.scale,
        window_left=-1 if kind.window is None else kind.window - 1,
        logits_soft_cap=kind.soft_cap,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )


def _starts(lengths: Iterable[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
