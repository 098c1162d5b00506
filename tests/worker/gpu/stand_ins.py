"""Stand-ins for attention libraries: functions with the published parameters, implemented in plain torch.
They check callers as the real ones do."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    for member, value in members.items():
        setattr(made, member, value)
    return made


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    soft_cap: float,
) -> torch.Tensor:
    """Attention of one sequence [tokens, heads, head_dim]. ``window``: the keys before and after a query's
    place that it sees, -1 for all; the last query is at the last key."""
    group = query.shape[1] // key.shape[1]
    scores = torch.zeros(query.shape[1], len(query), len(key), dtype=torch.float64)
    for head in range(query.shape[1]):
        scores[head] = query[:, head].double() @ key[:, head // group].double().T * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    for row in range(len(query)):
        place = row + len(key) - len(query)
        if causal or window[1] >= 0:
            scores[:, row, place + 1 + max(0, window[1]) :] = float("-inf")
        if window[0] >= 0:
            scores[:, row, : max(0, place - window[0])] = float("-inf")
    weights = scores.softmax(dim=-1)
    heads = [weights[head] @ value[:, head // group].double() for head in range(query.shape[1])]
    return torch.stack(heads, dim=1).to(query.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """FlashAttention-3's (hopper/flash_attn_interface.py)."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    starts, kv_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (starts[0], starts[-1], kv_starts[0], kv_starts[-1]) == (0, len(q), 0, len(k))
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    assert softmax_scale is not None
    return torch.cat(
        [
            attend(
                q[starts[i] : starts[i + 1]],
                k[kv_starts[i] : kv_starts[i + 1]],
                v[kv_starts[i] : kv_starts[i + 1]],
                softmax_scale,
                causal,
                window_size,
                softcap,
            )
            for i in range(len(starts) - 1)
        ]
    )


class BatchPrefillWithRaggedKVCacheWrapper:
    """FlashInfer's (flashinfer/prefill.py, 0.6)."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu", "the host waits for it otherwise"
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert sm_scale is not None
        type(self).num_plans += 1
        self._shapes = (
            (int(qo_indptr[-1]), num_qo_heads, head_dim_qk),
            (
                int(kv_indptr[-1]),
                num_kv_heads,
                head_dim_qk,
            ),
        )
        self._dtypes = q_data_type, kv_data_type
        self._starts = qo_indptr.tolist(), kv_indptr.tolist()
        self._kind = sm_scale, causal, (window_left, -1), logits_soft_cap or 0.0

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert (tuple(q.shape), tuple(k.shape)) == self._shapes
        assert (q.dtype, k.dtype) == self._dtypes
        starts, kv_starts = self._starts
        return torch.cat(
            [
                attend(
                    q[starts[i] : starts[i + 1]],
                    k[kv_starts[i] : kv_starts[i + 1]],
                    v[kv_starts[i] : kv_starts[i + 1]],
                    *self._kind,
                )
                for i in range(len(starts) - 1)
            ]
        )


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """torch.nn.attention.varlen's, of torch 2.13, over pages."""
    assert cu_seq_k is None
    assert block_table is not None
    assert seqused_k is not None
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert enable_gqa
    assert scale is not None
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
    starts, outputs = cu_seq_q.tolist(), []
    for i, seq_len in enumerate(seqused_k.tolist()):
        pages = block_table[i].long()[: -(-seq_len // key.shape[1])]
        k, v = (x[pages].flatten(0, 1)[:seq_len] for x in (key, value))
        causal = window_size == (-1, 0)
        outputs.append(attend(query[starts[i] : starts[i + 1]], k, v, scale, causal, window_size, 0.0))
    return torch.cat(outputs)


def varlen_attn_without_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """torch.nn.attention.varlen's, of torch 2.11."""
    raise AssertionError("it cannot be called as one that reads pages")
