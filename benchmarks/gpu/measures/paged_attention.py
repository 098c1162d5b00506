"""Checks paged attention and its writes against the definition in fp64, for batches as a step has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import LIMITS, picked, row_error, share_of_bytes_that_differ
from benchmarks.gpu.shapes import TimedModel
from benchmarks.gpu.sizes import Sizes
from engine.worker.gpu.prompt_attention import PromptAttention, select_prompt_attention
from engine.worker.gpu.step_batch import PromptChunk, StepBatch
from engine.worker.gpu.triton_paged import TritonPagedAttention

_NUM_LAYERS = 2
LAYER = 1
_KV_SCALE = 0.04
"""Scale of fp8 pages: 448 times it exceeds any of the noise."""
_VERIFIED = 4
"""Tokens of a sequence whose drafts are verified."""

Lengths = Sequence[tuple[int, int]]
"""Pairs (new, cached) of the tokens of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A layer's data types and its extensions of plain attention."""

    name: str
    dtype: torch.dtype
    stored: torch.dtype
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    """Whether each head has a logit that takes a share of the attention and adds no value."""

    @property
    def kv_scale(self) -> float:
        return _KV_SCALE if self.stored != self.dtype else 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """A batch, its pool, and the query, key and value that the model computed for it."""

    batch: StepBatch
    lengths: Lengths
    pool: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def check(bench: Bench) -> None:
    """Checks batches of each kind; the last two also with other heads and with all variants of a layer."""
    sizes = bench.sizes
    batches = list(_batches(bench))
    plain, *others = variants_of(sizes)
    for batch in batches:
        _check_case(bench, sizes.large, *batch, plain)
    for batch in batches[-2:]:
        _check_case(bench, sizes.small, *batch, plain)
        for variant in others:
            _check_case(bench, sizes.large, *batch, variant)


def variants_of(sizes: Sizes) -> tuple[Variant, ...]:
    """Returns all variants, the plain one first."""
    # Triton's interpreter cannot multiply bf16.
    half = torch.float16 if sizes.toy else torch.bfloat16
    fp8 = torch.float8_e4m3fn
    window = sizes.window
    name = str(half).removeprefix("torch.")
    return (
        Variant(name=name, dtype=half, stored=half),
        Variant(name="float32", dtype=torch.float32, stored=torch.float32),
        Variant(name=f"{name}, window {window}", dtype=half, stored=half, window=window),
        Variant(name=f"{name}, chunks of {window}", dtype=half, stored=half, chunk=window),
        Variant(name=f"{name}, soft cap 5", dtype=half, stored=half, soft_cap=5.0),
        Variant(name=f"{name}, sinks", dtype=half, stored=half, sinks=True),
        Variant(name=f"{name}, window {window}, sinks", dtype=half, stored=half, window=window, sinks=True),
        Variant(name="fp8 KV", dtype=half, stored=fp8),
        Variant(
            name=f"fp8 KV, window {window}, soft cap 5", dtype=half, stored=fp8, window=window, soft_cap=5.0
        ),
    )


def _batches(bench: Bench) -> Iterator[tuple[str, Lengths, int]]:
    """Yields name, lengths, and how many of the first sequences have equally many new tokens."""
    sizes = bench.sizes
    longest = sizes.decode_context
    for batch in sizes.decode_batches:
        yield f"decode, B={batch}", uniform_lengths(batch, 1, longest), batch
    cached = max(cached for _, cached in sizes.prompt_lengths)
    yield f"decode, B=1 at {cached:,}", [(1, cached)], 1
    for prompt in sizes.prompt_lengths:
        yield f"prompt, {prompt[0]:,} new on {prompt[1]:,}", [prompt], 0
    few = sizes.decode_batches[1]
    yield f"verification, {few} times {_VERIFIED}", uniform_lengths(few, _VERIFIED, longest), few
    mixed = [*uniform_lengths(few, 1, longest), *sizes.prompt_lengths[:2]]
    yield f"{few} decodes and {len(mixed) - few} prompts", mixed, few


def uniform_lengths(count: int, new: int, longest: int) -> Lengths:
    """Returns ``count`` lengths spread evenly up to the longest, which comes first."""
    return [(new, max(0, longest * (count - index) // count - new)) for index in range(count)]


def _check_case(
    bench: Bench, shape: TimedModel, batch_name: str, lengths: Lengths, num_uniform: int, variant: Variant
) -> None:
    name = f"{shape.name}, {variant.name}: {batch_name}"
    with bench.case(name):
        step = make_step(bench, shape, lengths, num_uniform, variant)
        attention = TritonPagedAttention(step.pool, variant.kv_scale)
        _check_write(bench, step, attention, variant, name)
        check_attention(bench, step, attention, shape, variant, f"{name}: attention")
        if step.batch.prompts:
            chosen = TritonPagedAttention(step.pool, variant.kv_scale, _installed_kernels(step, variant))
            check_attention(bench, step, chosen, shape, variant, f"{name}: by the kernels installed")


def _installed_kernels(step: Step, variant: Variant) -> Callable[[PromptAttention], PromptAttention]:
    """Selects the kernel that the engine would use for long prompts instead of Triton's own."""
    longest = max(sum(each) for each in step.lengths)
    return lambda floor: select_prompt_attention(
        step.pool, variant.dtype, longest, variant.kv_scale, floor, min_query_tokens=1
    )


def check_attention(
    bench: Bench,
    step: Step,
    attention: TritonPagedAttention,
    shape: TimedModel,
    variant: Variant,
    name: str,
) -> None:
    attention.begin_device_step(step.batch)
    found = attention.attend_written(
        LAYER,
        step.query,
        scale=shape.head_dim**-0.5,
        window=variant.window,
        chunk=variant.chunk,
        soft_cap=variant.soft_cap,
        sinks=_sinks(shape, step.query) if variant.sinks else None,
    )
    error = max(_errors(step, found, shape, variant))
    bench.check(name, error, bench.sizes.slack * LIMITS[variant.dtype])


def _sinks(shape: TimedModel, query: torch.Tensor) -> torch.Tensor:
    """Returns a logit of each head: [num_heads], from next to nothing to most of the attention"""
    return torch.linspace(-2.0, 10.0, shape.num_heads, device=query.device)


def make_step(bench: Bench, shape: TimedModel, lengths: Lengths, num_uniform: int, variant: Variant) -> Step:
    """Makes random contexts in shuffled blocks; query, key and value are views of one GEMM's output."""
    where = bench.device.where
    block_size = bench.sizes.block_size
    generator = torch.Generator(where).manual_seed(len(lengths) + sum(lengths[0]))
    blocks_each = [-(-sum(each) // block_size) for each in lengths]
    num_blocks = sum(blocks_each) + 1
    size = (num_blocks, _NUM_LAYERS, 2, block_size, shape.num_kv_heads, shape.head_dim)
    noise = torch.randn(size, generator=generator, device=where, dtype=variant.dtype)
    pool = (noise / variant.kv_scale).to(variant.stored)
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator, device=where, dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(blocks_each), dtype=torch.int32, device=where)
    for row, part in enumerate(torch.split(ids, blocks_each)):
        tables[row, : len(part)] = part
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    num_tokens = sum(new for new, _ in lengths)
    qkv = torch.randn(
        num_tokens, num_heads, shape.head_dim, generator=generator, device=where, dtype=variant.dtype
    )
    query, key, value = torch.split(qkv, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    batch = _step_batch(tables, lengths, num_uniform, block_size)
    return Step(batch, lengths, pool, query, key, value)


def _step_batch(tables: torch.Tensor, lengths: Lengths, num_uniform: int, block_size: int) -> StepBatch:
    where = tables.device
    new = torch.tensor([new for new, _ in lengths], device=where)
    cached = torch.tensor([cached for _, cached in lengths], device=where)
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    seq_of_token = torch.repeat_interleave(torch.arange(len(lengths), device=where), new)
    positions = torch.arange(len(seq_of_token), device=where) + (cached - starts[:-1])[seq_of_token]
    blocks = tables[seq_of_token, positions // block_size].long()
    prompts = tuple(
        PromptChunk(seq, int(starts[seq]), lengths[seq][0], sum(lengths[seq]))
        for seq in range(num_uniform, len(lengths))
    )
    return StepBatch(
        rows=torch.arange(len(lengths), dtype=torch.int32, device=where),
        query_starts=starts.to(torch.int32),
        seq_lens=(new + cached).to(torch.int32),
        block_tables=tables,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        num_uniform=num_uniform,
        uniform_len=lengths[0][0] if num_uniform else 1,
        max_uniform_seq_len=max((sum(each) for each in lengths[:num_uniform]), default=0),
        prompts=prompts,
    )


def _check_write(
    bench: Bench, step: Step, attention: TritonPagedAttention, variant: Variant, name: str
) -> None:
    """Checks that keys and values are in their slots (rounded in 8 bits) and the other layer is unchanged."""
    untouched = step.pool[:, 0].clone()
    attention.begin_device_step(step.batch)
    attention.write(LAYER, step.key, step.value)
    block_size = step.pool.shape[3]
    blocks = step.batch.slots // block_size
    offsets = step.batch.slots % block_size
    errors = [
        row_error(picked(step.pool[:, LAYER, which], blocks, offsets) * variant.kv_scale, expected)
        for which, expected in enumerate((step.key, step.value))
    ]
    limit = bench.sizes.slack * LIMITS[variant.stored] if variant.kv_scale != 1.0 else 0.0
    bench.check(f"{name}: KV written", max(errors), limit)
    bench.check(f"{name}: other layers", share_of_bytes_that_differ(step.pool[:, 0], untouched), 0.0)


def _errors(step: Step, found: torch.Tensor, shape: TimedModel, variant: Variant) -> Iterator[float]:
    """Yields the errors of each sequence."""
    starts = step.batch.query_starts.tolist()
    for seq, (new, cached) in enumerate(step.lengths):
        tokens = slice(starts[seq], starts[seq + 1])
        keys, values = (_gathered(step, seq, new + cached, which, variant) for which in (0, 1))
        yield from _errors_by_head(step.query[tokens], keys, values, found[tokens], shape, variant)


def _gathered(step: Step, seq: int, seq_len: int, which: int, variant: Variant) -> torch.Tensor:
    """Returns a sequence's keys (0) or values (1) in the pool: [seq_len, num_kv_heads, head_dim]"""
    block_size = step.pool.shape[3]
    blocks = step.batch.block_tables[seq, : -(-seq_len // block_size)].long()
    return picked(step.pool[:, LAYER, which], blocks).flatten(0, 1)[:seq_len] * variant.kv_scale


def _errors_by_head(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    found: torch.Tensor,
    shape: TimedModel,
    variant: Variant,
) -> Iterator[float]:
    """Yields errors one KV head at a time: the scores of all heads would take tens of gigabytes."""
    group = shape.num_heads // shape.num_kv_heads
    places = torch.arange(len(keys), device=keys.device)
    distance = places[len(keys) - len(query) :, None] - places
    hidden = (distance < 0) | (distance >= (variant.window or len(keys)))
    if variant.chunk is not None:
        hidden |= places[-len(query) :, None] // variant.chunk != places // variant.chunk
    for head in range(shape.num_kv_heads):
        part = slice(head * group, (head + 1) * group)
        scores = torch.einsum("qhd,kd->hqk", query[:, part].double(), keys[:, head].double())
        scores *= shape.head_dim**-0.5
        if variant.soft_cap is not None:
            scores = variant.soft_cap * (scores / variant.soft_cap).tanh()
        scores.masked_fill_(hidden, float("-inf"))
        if variant.sinks:
            sinks = _sinks(shape, query)[part].double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        expected = torch.einsum("hqk,kd->qhd", weights, values[:, head].double())
        yield row_error(found[:, part], expected)
