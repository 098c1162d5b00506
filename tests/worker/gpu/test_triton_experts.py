"""The grouped GEMM of experts, in Triton's interpreter and compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from engine.worker.gpu import triton_experts
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_ops import TritonOps
from engine.worker.models.builder import Builder
from engine.worker.models.moe import Experts
from engine.worker.models.shape import ClampedGate, Routing, SparseShape
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.worker.gpu.sm90 import MAX_SHARED_BYTES, LaunchRecorder, compile_all_for_sm90
from tests.worker.parallel.ranks import LoneRank

HIDDEN_SIZE, EXPERT_SIZE, NUM_EXPERTS, PER_TOKEN = 80, 48, 6, 2
CLAMPED = ClampedGate(alpha=1.7, limit=0.5)
CONSUMER_SHARED_BYTES = 99 * 1024
"""Shared memory of one thread block on sm_86, sm_89 and sm_120 (as MAX_SHARED_BYTES)."""


def experts_of(
    dtype: torch.dtype,
    group: TensorParallelGroup = ALONE,
    *,
    by_rank: bool = True,
    clamped: ClampedGate | None = None,
) -> Experts:
    """Random experts, or a rank's: some whole, or a part of each."""
    shape = SparseShape(EXPERT_SIZE, Routing(NUM_EXPERTS, PER_TOKEN), clamped=clamped)
    part = shape.of_rank(group.size, experts_by_rank=by_rank and group.size > 1)
    experts = Experts(HIDDEN_SIZE, part, Builder(dtype, group)).to_empty(device="cpu").requires_grad_(False)
    torch.manual_seed(group.rank)
    for weight in experts.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5)
    return experts


def step_of(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, their experts, one of which is rarely chosen, and weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).to(dtype)
    favor = torch.linspace(0.7, 0.0, NUM_EXPERTS)
    chosen = (torch.rand(num_tokens, NUM_EXPERTS, generator=generator) + favor).topk(PER_TOKEN).indices
    return x, chosen, torch.rand(num_tokens, PER_TOKEN, generator=generator)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 120, 200])
@pytest.mark.parametrize("group", [ALONE, LoneRank(1, 2)], ids=["all", "half"])
@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
def test_sums_are_those_of_torch(
    num_tokens: int, group: TensorParallelGroup, clamped: ClampedGate | None
) -> None:
    """Sums are right for one row, for full and partial tiles of all sizes, and for a rank's experts."""
    experts, step = experts_of(torch.float32, group, clamped=clamped), step_of(num_tokens, torch.float32)
    x, chosen, weights = step
    found = TritonOps().mix_experts(x, experts, chosen, weights)
    torch.testing.assert_close(found, TorchOps().mix_experts(x, experts, chosen, weights))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_adds_the_bias_of_outputs(rank: int) -> None:
    """Where ranks have a part of each expert, only one adds the bias."""
    experts = experts_of(torch.float32, LoneRank(rank, 2), by_rank=False, clamped=CLAMPED)
    x, chosen, weights = step_of(9, torch.float32)
    found = TritonOps().mix_experts(x, experts, chosen, weights)
    torch.testing.assert_close(found, TorchOps().mix_experts(x, experts, chosen, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
def test_halves_are_rounded_where_torch_rounds_them(dtype: torch.dtype, clamped: ClampedGate | None) -> None:
    """Weights of tokens are in fp32, or rounded as some routers do."""
    experts, (x, chosen, weights) = experts_of(torch.float16, clamped=clamped), step_of(40, torch.float16)
    found = TritonOps().mix_experts(x, experts, chosen, weights.to(dtype))
    wanted = TorchOps().mix_experts(x, experts, chosen, weights.to(dtype))
    assert (found == wanted).float().mean() > 0.9
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("num_tokens", "tile_rows"), [(1, 16), (3, 16), (90, 16), (100, 64), (9000, 128)])
@pytest.mark.parametrize("group", [ALONE, LoneRank(1, 2)], ids=["all", "half"])
def test_rows_are_sorted_by_expert_into_tiles(
    num_tokens: int, tile_rows: int, group: TensorParallelGroup
) -> None:
    """The rows stay in order, whatever runs first; the tiles have each row of an own expert once, and no
    others. With 9,000 tokens an expert has more tiles than are written at a time."""
    experts, chosen = experts_of(torch.float32, group), step_of(num_tokens, torch.float32)[1]
    if num_tokens == 9000:
        chosen[:, 0] = experts.first + 1
    rows = triton_experts._sort(chosen, experts)
    own = chosen.flatten() - experts.first
    is_own = (own >= 0) & (own < len(experts.gate_up))
    order = torch.where(is_own, own, NUM_EXPERTS).argsort(stable=True)[: is_own.sum()]
    assert rows.places.flatten()[order].tolist() == list(range(len(order)))
    assert rows.tokens[: len(order)].tolist() == (order // PER_TOKEN).tolist()
    assert rows.tiles.rows == tile_rows
    covered: list[int] = []
    for expert, begin, end in rows.table.tolist():
        inside = range(begin, min(end, begin + tile_rows))
        assert all(own[order[row]] == expert for row in inside)
        covered += inside
    assert sorted(covered) == list(range(len(order)))


def test_numbers_are_rounded_where_torch_rounds_them() -> None:
    """The roundings agree nearly: the interpreter truncates bf16 where a GPU rounds to the nearest."""
    experts, (x, chosen, weights) = experts_of(torch.bfloat16), step_of(40, torch.bfloat16)
    found = TritonOps().mix_experts(x, experts, chosen, weights).float()
    wanted = TorchOps().mix_experts(x, experts, chosen, weights).float()
    assert (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.slow
def test_it_fits_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes of Qwen3-30B-A3B and gpt-oss-20b, for decodes and prompts, nothing is spilled, and what
    smaller GPUs use fits these. Tensors are on the device meta, because no shape depends on data."""
    kernels = ("_sort_rows", "_gates_times_ups", "_multiply_rows", "_sum_rows")
    recorders = [LaunchRecorder(getattr(triton_experts, name)) for name in kernels]
    for name, recorder in zip(kernels, recorders, strict=True):
        monkeypatch.setattr(triton_experts, name, recorder)
    qwen = SparseShape(768, Routing(128, 8))
    gpt_oss = SparseShape(2880, Routing(32, 4), clamped=ClampedGate(1.702, 7.0))
    for hidden_size, shape, sizes in ((2048, qwen, (8, 512, 2048)), (2880, gpt_oss, (8, 256, 512))):
        experts = Experts(hidden_size, shape, Builder(torch.bfloat16, ALONE)).to_empty(device="meta")
        for num_tokens in sizes:
            x = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device="meta")
            chosen = torch.empty(
                num_tokens, shape.routing.experts_per_token, dtype=torch.int64, device="meta"
            )
            TritonOps().mix_experts(x, experts, chosen, torch.empty_like(chosen, dtype=torch.float32))
    builds = [build for recorder in recorders for build in recorder.builds]
    assert {build.constexprs["BLOCK_N"] for build in recorders[2].builds} == {64, 128, 256}
    for build, used in zip(builds, compile_all_for_sm90(builds), strict=True):
        assert used.spill_bytes == 0
        is_for_hopper = build.constexprs.get("TILE_ROWS") == triton_experts._MANY.rows
        assert used.shared_bytes <= (MAX_SHARED_BYTES if is_for_hopper else CONSUMER_SHARED_BYTES)


def test_a_smaller_gpu_has_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 has shared memory for the largest tiles, but too few registers."""
    for shared_bytes in (CONSUMER_SHARED_BYTES, 163 * 1024):
        monkeypatch.setattr(triton_experts, "shared_bytes_of", lambda _, size=shared_bytes: size)
        assert triton_experts._tiles_for(1 << 20, 128, torch.device("cuda")) == triton_experts._SOME
