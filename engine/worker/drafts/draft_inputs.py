"""Some tokens of each of a step's sequences as the arrays of a drafter's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.worker.attention.backend import AttentionBatch, IntArray
from engine.worker.sampling_batch import BoolArray


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """A forward pass: sequences in the order of ``attention``."""

    order: IntArray
    """[num_seqs] index into the given sequences."""
    seq_of_token: IntArray
    """[num_tokens] index into the given sequences."""
    positions: IntArray
    """[num_tokens]"""
    last_tokens: IntArray
    """[num_seqs] index of each sequence's last token."""
    attention: AttentionBatch


def draft_inputs(
    starts: IntArray, ends: IntArray, tables: IntArray, block_size: int, is_free: BoolArray
) -> DraftInputs:
    """The tokens ``starts`` to ``ends`` of sequences, at least one per sequence.

    starts, ends [num_seqs]; tables [num_seqs, max_blocks]: their block tables. is_free [num_seqs]: whether a
    sequence reads no KV that others write in this pass; those that do read it are ordered last.
    """
    query_lens = ends - starts
    is_decode = (query_lens == 1) & is_free
    order = np.lexsort((np.where(is_decode, ends, 0), ~is_decode))
    query_lens = query_lens[order]
    seq_lens = ends[order]
    token_ends = np.cumsum(query_lens)
    seqs = np.repeat(np.arange(len(order)), query_lens)
    positions = np.arange(len(seqs)) + (seq_lens - token_ends)[seqs]
    pages, offsets = np.divmod(positions, block_size)
    tables = np.ascontiguousarray(tables[order, : -(-int(seq_lens.max()) // block_size)])
    return DraftInputs(
        order=order,
        seq_of_token=order[seqs],
        positions=positions,
        last_tokens=token_ends - 1,
        attention=AttentionBatch(
            num_decodes=int(np.count_nonzero(is_decode)),
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=tables,
            slot_blocks=tables[seqs, pages],
            slot_offsets=offsets,
        ),
    )
