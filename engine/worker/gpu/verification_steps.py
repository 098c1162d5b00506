"""Steps that verify drafts: which of their sequences are uniform, and how all become uniform for a graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.core.outputs import SchedulerOutput
from engine.worker.attention.backend import IntArray
from engine.worker.gpu.graph_sizes import GraphShape, GraphSizes
from engine.worker.request_rows import StepRows
from engine.worker.sampling_batch import BoolArray

NOWHERE = -1
"""Slot of a token whose K and V are not stored."""
KNOWN = -1
"""In place of a draft: the sample follows a known token."""


def uniform_len_of(plan: SchedulerOutput, verified_len: int) -> int:
    """Query tokens of the uniform sequences of a plan: 1; with drafts, the most frequent length of at most
    ``verified_len`` tokens. Sequences of other lengths are computed like prompts."""
    if not plan.scheduled_spec_decode_tokens:
        return 1
    lengths = np.fromiter(plan.num_scheduled_tokens.values(), dtype=np.int64)
    counts = np.bincount(lengths[lengths <= verified_len], minlength=2)
    return max(1, int(counts.argmax()))


def graph_of(step: StepRows, sizes: GraphSizes) -> GraphShape | None:
    """The graph that computes a step, padded or not; None: it runs eagerly."""
    num_seqs = len(step.rows)
    if step.sample_drafts is None:
        return sizes.smallest(num_seqs) if step.num_uniform == num_seqs else None
    length = sizes.verified_len
    fits = (step.query_lens <= length).all() and (step.seq_lens >= length).all()
    return sizes.smallest(num_seqs, length) if fits else None


def with_equal_lengths(step: StepRows, length: int) -> StepRows:
    """The step with ``length`` tokens for each sequence, which has at most that many and is at least that
    long.

    Missing tokens are those before its own. They are recomputed; their KV is already there and is not
    written, and nothing is sampled after them. So no sequence gets longer, and nothing counts them.
    """
    if (step.query_lens == length).all():
        return step
    num_seqs = len(step.rows)
    own = np.arange(length) >= length - step.query_lens[:, None]
    positions = (step.seq_lens - length)[:, None] + np.arange(length)
    return replace(
        step,
        num_uniform=num_seqs,
        query_lens=np.full_like(step.query_lens, length),
        row_of_token=np.repeat(step.rows, length),
        positions=positions.ravel(),
        slots=_spread(step.slots, own),
        other_slots=tuple(_spread(slots, own) for slots in step.other_slots),
        sample_tokens=np.flatnonzero(own)[step.sample_tokens],
    )


def drafts_of_samples(plan: SchedulerOutput, step: StepRows) -> IntArray:
    """[num_samples] the draft after which each sample is drawn, or KNOWN."""
    assert step.sample_drafts is not None
    behind = np.full_like(step.sample_drafts, KNOWN)
    starts = np.flatnonzero(step.sample_drafts == 0)
    for start, seq in zip(starts.tolist(), step.sample_seqs[starts].tolist(), strict=True):
        drafts = plan.scheduled_spec_decode_tokens.get(step.req_ids[seq], ())
        behind[start + 1 : start + 1 + len(drafts)] = drafts
    return behind


def _spread(slots: IntArray, own: BoolArray) -> IntArray:
    """slots [num_tokens], own [num_seqs, length] -> [num_seqs * length], NOWHERE where ``own`` is false"""
    spread: IntArray = np.full(own.size, NOWHERE)
    spread[own.ravel()] = slots
    return spread
