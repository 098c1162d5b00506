"""The interface between a model and its paged KV: one step's batch, and what a backend does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.attention.chosen_latents import LatentChoice

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step, their tokens flattened in this order: first the ``num_decodes`` sequences
    with a single query token that read no KV written by others in this step, shortest sequence first; then
    the others, each after those whose KV it reads."""

    num_decodes: int
    query_lens: IntArray
    """[num_seqs] tokens computed in this step."""
    seq_lens: IntArray
    """[num_seqs] tokens in the KV after this step."""
    block_tables: IntArray
    """[num_seqs, max_blocks]; entries past a sequence's end are 0, the null block. Blocks before the first
    block that a sequence's first query token sees may be null or another sequence's."""
    slot_blocks: IntArray
    """[num_tokens] block for the K and V of each token."""
    slot_offsets: IntArray
    """[num_tokens] offset in that block."""
    other_groups: tuple[AttentionBatch, ...] = ()
    """The same sequences with the block tables of the KV cache groups after the first."""

    @property
    def by_group(self) -> tuple[AttentionBatch, ...]:
        """The batch of each KV cache group."""
        return (self, *self.other_groups)


class AttentionBackend(Protocol):
    """Writes K and V to the pool and computes attention from it."""

    def begin_step(self, batch: AttentionBatch) -> None:
        """Prepare, once per step, what its layers need on the device."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store key and value, and return the causal attention of the query over each sequence's KV.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
        result like query. ``window``: a token sees itself and the ``window - 1`` tokens before it; numbers
        outside the window have no effect. ``chunk``: likewise, but a sequence is split into chunks, and a
        token sees those of its chunk up to itself. ``soft_cap``: scores become soft_cap *
        tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118, section 2). ``sinks`` [num_heads]: the score of
        one more key in each head's softmax, whose value is 0 (gpt-oss, arXiv:2508.10925, section 2).
        """

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        *,
        value_size: int,
        scale: float,
        choice: LatentChoice | None = None,
    ) -> torch.Tensor:
        """Store latents, in a pool with one vector per token, and return the causal attention of the query
        over each sequence's latents: whole latents are the keys of all heads, their first numbers the values.

        query [num_tokens, num_heads, latent_size]; latent [num_tokens, latent_size];
        result [num_tokens, num_heads, value_size]. ``choice``: queries of longer sequences attend to the
        latents that an indexer chooses; the last numbers of latents are its keys, and those of queries are 0.
        """
