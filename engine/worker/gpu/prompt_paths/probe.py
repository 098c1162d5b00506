"""Checks a prefill path against a reference, on the device that will run it, before it is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from engine.worker.gpu.prompt_paths.path import AttentionKind, PromptPath, Prompts
from engine.worker.gpu.step_batch import PromptChunk

logger = logging.getLogger(__name__)

_LENGTHS = ((40, 40), (24, 100))
"""Pairs (query, sequence) of lengths: a new prompt, and one after a cached context."""
_GROUP = 4
"""Query heads per KV head."""
_WINDOW = 17
_SOFT_CAP = 5.0
_TOLERANCE = 0.05
"""The largest allowed error of outputs of size 1, for 8-bit inputs and outputs of a GEMM."""


@dataclass(frozen=True, slots=True)
class ProvenPath:
    """A path, and the kinds of attention that it computed correctly."""

    path: PromptPath
    has_window: bool
    has_soft_cap: bool

    @property
    def can_all(self) -> bool:
        return self.has_window and self.has_soft_cap

    def can(self, kind: AttentionKind) -> bool:
        return (self.has_window or kind.window is None) and (self.has_soft_cap or kind.soft_cap is None)


@dataclass(frozen=True, slots=True)
class Probe:
    """Two prompts over a small pool of random values, in the layout of a real one."""

    pool: torch.Tensor
    """[num_blocks, num_slots, 2, block_size, num_kv_heads, head_dim]"""
    kv_scale: float
    query: torch.Tensor
    prompts: Prompts

    @classmethod
    def like(cls, pool: torch.Tensor, dtype: torch.dtype, kv_scale: float) -> Probe:
        """A probe with queries of ``dtype`` and a pool of this type and layout. Its values are of size 1
        after scaling, so that errors show."""
        generator = torch.Generator().manual_seed(0)
        block_size, num_kv_heads, head_dim = pool.shape[3:]
        blocks_each = -(-max(seq_len for _, seq_len in _LENGTHS) // block_size)
        num_blocks = 1 + len(_LENGTHS) * blocks_each
        noise = torch.randn((num_blocks, 2, 2, block_size, num_kv_heads, head_dim), generator=generator)
        num_tokens = sum(query_len for query_len, _ in _LENGTHS)
        query = torch.randn((num_tokens, _GROUP * num_kv_heads, head_dim), generator=generator)
        tables = 1 + torch.randperm(num_blocks - 1, generator=generator).view(len(_LENGTHS), -1)
        kv_scale = kv_scale if pool.dtype != dtype else 1.0
        largest = torch.finfo(pool.dtype).max
        return cls(
            (noise / kv_scale).clamp(-largest, largest).to(pool.device, dtype).to(pool.dtype),
            kv_scale,
            query.to(pool.device, dtype),
            _prompts(tables.int().to(pool.device)),
        )

    def prove(self, path: PromptPath) -> ProvenPath | None:
        """The path with the kinds that it computes correctly; None if it fails for full attention."""
        full = AttentionKind(self.query.shape[-1] ** -0.5, None, None)
        if not self._is_right(path, full):
            return None
        return ProvenPath(
            path,
            has_window=self._is_right(path, replace(full, window=_WINDOW)),
            has_soft_cap=self._is_right(path, replace(full, soft_cap=_SOFT_CAP)),
        )

    @torch.inference_mode()
    def _is_right(self, path: PromptPath, kind: AttentionKind) -> bool:
        if not path.can(kind):
            return False
        keys = self.pool[:, 1, 0]
        values = self.pool[:, 1, 1]
        try:
            output = path.attend(keys, values, self.query, self.prompts, kind)
            error = float((output.float() - self._expected(kind)).abs().max())
        except Exception as raised:  # a library may raise anything
            reason = str(raised).partition("\n")[0]
            logger.debug("Prefill attention %s is unavailable: %s", path.name, reason)
            return False
        if not error < _TOLERANCE:
            logger.warning(
                "Prefill attention %s is off by %.3g for %s: disabled for it.", path.name, error, kind
            )
            return False
        return True

    def _expected(self, kind: AttentionKind) -> torch.Tensor:
        """The reference in fp32. The pool is converted first: not all devices can index 8-bit values."""
        pool = self.pool.float() * self.kv_scale
        outputs = []
        token = 0
        for chunk, table in zip(self.prompts.chunks, self.prompts.block_tables.long(), strict=True):
            pages = pool[table, 1]
            key, value = (pages[:, which].flatten(0, 1)[: chunk.seq_len] for which in (0, 1))
            query = self.query[token : token + chunk.query_len].float()
            outputs.append(attention_by_definition(query, key, value, kind))
            token += chunk.query_len
        return torch.cat(outputs)


def attention_by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: AttentionKind
) -> torch.Tensor:
    """query [num_queries, num_heads, head_dim]; key, value [seq_len, num_kv_heads, head_dim]; the last query
    has the position of the last key. Result like query."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * kind.scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    places = torch.arange(len(key), device=key.device)
    distance = places[len(key) - len(query) :, None] - places
    hidden = (distance < 0) | (distance >= (kind.window or len(key)))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _prompts(block_tables: torch.Tensor) -> Prompts:
    chunks = []
    token = 0
    for seq, (query_len, seq_len) in enumerate(_LENGTHS):
        chunks.append(PromptChunk(seq, token, query_len, seq_len))
        token += query_len
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=block_tables.device)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    return Prompts(
        tuple(chunks),
        starts[:, 0].contiguous(),
        starts[:, 1].contiguous(),
        lengths[:, 1].contiguous(),
        block_tables,
    )
