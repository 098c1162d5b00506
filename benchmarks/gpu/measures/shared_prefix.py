"""Compares decodes that share a prefix in one pass with the usual way and with the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.paged_attention import LAYER, Step, check_attention, make_step, variants_of
from engine.worker.gpu.step_batch import PREFIX_UNIT, SharedPrefix
from engine.worker.gpu.triton_paged import TritonPagedAttention

_TIMED_CALLS = 10
_LEAST = 256
"""Tokens of the shortest prefix for which the engine uses the shared pass."""


@dataclass(frozen=True, slots=True)
class _Case:
    num_seqs: int
    num_shared: int
    """Tokens of the prefix that all sequences share."""
    num_own: int
    """Tokens of each sequence after the prefix."""

    @property
    def name(self) -> str:
        return f"B={self.num_seqs}, {self.num_shared:,} tokens shared and {self.num_own:,} of each"


def check(bench: Bench) -> None:
    """Checks and times the attention of a layer."""
    for case in _cases(bench):
        with bench.case(f"shared prefix: {case.name}"):
            _check_case(bench, case)


def _cases(bench: Bench) -> Iterator[_Case]:
    half = bench.sizes.decode_context // 2
    shared = max(PREFIX_UNIT, half // PREFIX_UNIT * PREFIX_UNIT)
    for batch in bench.sizes.decode_batches[1:]:
        yield _Case(batch, shared, half)
        if not bench.sizes.toy:
            yield _Case(batch, _LEAST, _LEAST)


def _check_case(bench: Bench, case: _Case) -> None:
    shape = bench.sizes.large
    variant = variants_of(bench.sizes)[0]
    lengths = [(1, case.num_shared + case.num_own - 1)] * case.num_seqs
    usual = _with_shared_blocks(make_step(bench, shape, lengths, case.num_seqs, variant), case)
    in_one_pass = _with_pass(usual, case)
    attention = TritonPagedAttention(usual.pool)
    num_read = case.num_shared + case.num_seqs * case.num_own
    size = num_read * 2 * shape.num_kv_heads * shape.head_dim * variant.stored.itemsize
    for name, step in (("read by each", usual), ("read in one pass", in_one_pass)):
        check_attention(bench, step, attention, shape, variant, f"shared prefix, {name}: {case.name}")

        def attend(query: torch.Tensor = step.query) -> torch.Tensor:
            return attention.attend_written(LAYER, query, scale=shape.head_dim**-0.5, window=None)

        bench.figure(
            f"attention behind a prefix {name}, a layer, {case.name}",
            "us",
            [1e6 * each for each in bench.repeats_of_kernels(attend, _TIMED_CALLS)],
            floor=1e6 * size / bench.rates.copy_bytes_s,
        )


def _with_shared_blocks(step: Step, case: _Case) -> Step:
    """Makes all sequences begin with the blocks of the first."""
    tables = step.batch.block_tables.clone()
    num_blocks = case.num_shared // step.pool.shape[3]
    tables[:, :num_blocks] = tables[0, :num_blocks].clone()
    return replace(step, batch=replace(step.batch, block_tables=tables))


def _with_pass(step: Step, case: _Case) -> Step:
    where = step.pool.device
    place = torch.tensor([0, case.num_shared], dtype=torch.int32, device=where)
    lens = torch.full((case.num_seqs,), case.num_shared, dtype=torch.int32, device=where)
    return replace(step, batch=replace(step.batch, prefix=SharedPrefix(place, lens)))
