"""Experts in compiled code compute what torch computes, expert by expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_experts import PackedExperts, fits_kernels, packed_experts, quantized_experts
from engine.worker.cpu.packed_weights import Weight4, Weight8, compiled_gemm
from engine.worker.cpu.quantization import to_int4, to_int8
from engine.worker.models.builder import Builder
from engine.worker.models.moe import Experts
from engine.worker.models.shape import ClampedGate, Routing, SparseShape
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.worker.parallel.ranks import LoneRank

HIDDEN_SIZE, EXPERT_SIZE, NUM_EXPERTS, PER_TOKEN = 320, 96, 10, 3
CLAMPED = ClampedGate(1.702, 1.0)
"""gpt-oss's gate, with a limit that many numbers exceed."""


def experts_of(
    group: TensorParallelGroup = ALONE,
    *,
    rounded: bool = False,
    expert_size: int = EXPERT_SIZE,
    clamped: ClampedGate | None = None,
) -> Experts:
    """Random experts, or a rank's part of them."""
    routing = Routing(NUM_EXPERTS, PER_TOKEN, rounded=rounded)
    whole = SparseShape(expert_size, routing, clamped=clamped)
    shape = whole.of_rank(group.size, experts_by_rank=group.size > 1)
    experts = Experts(HIDDEN_SIZE, shape, Builder(torch.bfloat16, group)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for weight, size in ((experts.gate_up, HIDDEN_SIZE), (experts.down, expert_size)):
        numbers = torch.randn(whole.num_local_experts, *weight.shape[1:], generator=generator)
        first = experts.first
        weight.data.copy_(numbers[first : first + len(weight)] / size**0.5)
    for bias in (experts.gate_up_bias, experts.down_bias):
        if bias is not None:
            numbers = torch.randn(whole.num_local_experts, bias.shape[1], generator=generator)
            bias.data.copy_(numbers[experts.first : experts.first + len(bias)])
    return experts.requires_grad_(False)


def rows_of(num_rows: int, seed: int, *, skewed: bool = False) -> tuple[torch.Tensor, ...]:
    """Rows, their experts, and weights. ``skewed``: nearly all rows have the same experts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, HIDDEN_SIZE, generator=generator).bfloat16()
    favor = torch.linspace(3.0 if skewed else 0.0, 0.0, NUM_EXPERTS)
    experts = (torch.rand(num_rows, NUM_EXPERTS, generator=generator) + favor).topk(PER_TOKEN).indices
    return x, experts, torch.rand(num_rows, PER_TOKEN, generator=generator)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-9))


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.sampled_from((1, 2, 3, 8, 17, 40, 150, 700)),
    seed=st.integers(0, 1000),
    skewed=st.booleans(),
    rounded=st.booleans(),
    clamped=st.sampled_from((None, CLAMPED)),
)
def test_sums_are_those_of_torch(
    num_rows: int, seed: int, skewed: bool, rounded: bool, clamped: ClampedGate | None
) -> None:
    """For few rows and many, spread over all experts or crowded on some, sums err from torch's in fp32 by
    less than bf16's rounding."""
    gemm = gemm_or_skip()
    plain = experts_of(rounded=rounded, clamped=clamped)
    wide = experts_of(rounded=rounded, clamped=clamped).float()
    packed = packed_experts(plain, gemm)
    assert isinstance(packed, PackedExperts)
    x, experts, weights = rows_of(num_rows, seed, skewed=skewed)
    weights = weights.bfloat16() if rounded else weights
    wanted = wide(x.float(), experts, weights.float())
    assert distance(packed(x, experts, weights), wanted) < 0.008


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_alone_is_as_in_company(num_threads: int, compiled: CompiledGemm) -> None:
    """A row gets the same bits whichever rows share its experts, with any number of threads."""
    packed = packed_experts(experts_of(), compiled)
    x, experts, weights = rows_of(200, seed=1, skewed=True)
    together = packed(x, experts, weights)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for row in (0, 1, 77, 199):
            alone = packed(x[row : row + 1], experts[row : row + 1], weights[row : row + 1])
            assert torch.equal(alone[0], together[row])
        assert torch.equal(packed(x, experts, weights), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 5, 90])
@pytest.mark.parametrize("clamped", [None, CLAMPED])
def test_quantized_experts_are_those_that_were_quantized(
    clamped: ClampedGate | None, bits: int, num_rows: int, compiled: CompiledGemm
) -> None:
    """Sums equal torch's in fp32 with equally quantized weights."""
    wide = experts_of(clamped=clamped).float()
    for weight in (wide.gate_up, wide.down):
        rows = weight.data.bfloat16().flatten(0, 1)
        weight.data.copy_(dequantized(rows, bits).view_as(weight))
    packed = quantized_experts(experts_of(clamped=clamped), Weight8 if bits == 8 else Weight4, compiled)
    x, experts, weights = rows_of(num_rows, seed=2)
    assert distance(packed(x, experts, weights), wide(x.float(), experts, weights)) < 0.01


def dequantized(rows: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        numbers, scales = to_int8(rows)
        return numbers.float() * scales.float()[:, None]
    numbers, grid = to_int4(rows)
    scales, zeros = grid.float().unbind(-1)
    groups = numbers.view(*scales.shape, -1).float()
    return ((groups - 8) * scales[..., None] + zeros[..., None]).flatten(1)


@pytest.mark.parametrize("num_rows", [1, 4, 60])
@pytest.mark.parametrize("clamped", [None, CLAMPED])
def test_ranks_with_some_experts_each_add_up(
    clamped: ClampedGate | None, num_rows: int, compiled: CompiledGemm
) -> None:
    """With torch and with compiled code, a token without experts on a rank gets zeros there."""
    x, experts, weights = rows_of(num_rows, seed=3)
    wanted = experts_of(clamped=clamped).float()(x.float(), experts, weights)
    ranks = [LoneRank(rank, 2) for rank in range(2)]
    plain = [experts_of(rank, clamped=clamped).float()(x.float(), experts, weights) for rank in ranks]
    assert distance(sum(plain, torch.zeros(())), wanted) < 1e-5
    parts = [packed_experts(experts_of(rank, clamped=clamped), compiled) for rank in ranks]
    packed = [part(x, experts, weights).float() for part in parts]
    assert distance(sum(packed, torch.zeros(())), wanted) < 0.01


def test_sizes_that_fill_no_unit_stay_as_they_are(compiled: CompiledGemm) -> None:
    """Torch multiplies these sizes."""
    plain = experts_of(expert_size=80)
    assert not fits_kernels(plain)
    assert packed_experts(plain, compiled) is plain


def gemm_or_skip() -> CompiledGemm:
    gemm = compiled_gemm(32, torch.device("cpu"), torch.bfloat16)
    if gemm is None:
        pytest.skip("there is no compiled GEMM: it needs a compiler and a CPU with AVX512_BF16")
    return gemm
