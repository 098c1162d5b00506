"""The sequences of a step on a device, for attention over chosen latents. The host never waits."""

from __future__ import annotations

from collections.abc import Iterator

from engine.worker.attention.chosen_latents import LatentSequence
from engine.worker.gpu.step_batch import StepBatch


def longest_of(batch: StepBatch) -> int:
    """An upper bound of the lengths of the step's sequences."""
    prompts = max((chunk.seq_len for chunk in batch.prompts), default=0)
    return max(prompts, batch.max_uniform_seq_len if batch.num_uniform else 0)


def sequences_of(batch: StepBatch, block_size: int) -> Iterator[LatentSequence]:
    """Every sequence by itself: first the uniform ones, whose lengths have one upper bound."""
    uniform_len = batch.uniform_len
    places = ((seq, seq * uniform_len, uniform_len) for seq in range(batch.num_uniform))
    uniform = ((*place, batch.max_uniform_seq_len) for place in places)
    prompts = ((each.seq, each.first_token, each.query_len, each.seq_len) for each in batch.prompts)
    for seq, start, query_len, seq_len in (*uniform, *prompts):
        num_blocks = -(-seq_len // block_size)
        table = batch.block_tables.index_select(0, batch.rows[seq : seq + 1])
        end = start + query_len
        yield LatentSequence(start, end, seq_len, table[0, :num_blocks].long(), batch.positions[start:end])
