"""The grouped GEMM of experts, in Triton's interpreter and compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from engine.worker.gpu import triton_experts
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_ops import TritonOps
from engine.worker.models.builder import Builder
from engine.worker.models.moe import Experts
from engine.worker.models.shape import Routing, SparseShape
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.worker.gpu.sm90 import MAX_SHARED_BYTES, LaunchRecorder, compile_all_for_sm90
from tests.worker.parallel.ranks import LoneRank

HIDDEN_SIZE, EXPERT_SIZE, NUM_EXPERTS, PER_TOKEN = 80, 48, 6, 2


def experts_of(dtype: torch.dtype, group: TensorParallelGroup = ALONE) -> Experts:
    """Random ones, or a rank's."""
    shape = SparseShape(EXPERT_SIZE, Routing(NUM_EXPERTS, PER_TOKEN))
    part = shape.of_rank(group.size, experts_by_rank=group.size > 1)
    experts = Experts(HIDDEN_SIZE, part, Builder(dtype, group)).to_empty(device="cpu").requires_grad_(False)
    torch.manual_seed(group.rank)
    experts.gate_up.normal_(0, HIDDEN_SIZE**-0.5)
    experts.down.normal_(0, EXPERT_SIZE**-0.5)
    return experts


def step_of(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, the experts that they go to, of which one is rarely chosen, and weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).to(dtype)
    favor = torch.linspace(0.7, 0.0, NUM_EXPERTS)
    chosen = (torch.rand(num_tokens, NUM_EXPERTS, generator=generator) + favor).topk(PER_TOKEN).indices
    return x, chosen, torch.rand(num_tokens, PER_TOKEN, generator=generator)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 120])
@pytest.mark.parametrize("group", [ALONE, LoneRank(1, 2)], ids=["all", "half"])
def test_sums_are_those_of_torch(num_tokens: int, group: TensorParallelGroup) -> None:
    """For a row and for tiles that are full or not, small and large; a rank leaves out what others have."""
    experts, step = experts_of(torch.float32, group), step_of(num_tokens, torch.float32)
    x, chosen, weights = step
    found = TritonOps().mix_experts(x, experts, chosen, weights)
    torch.testing.assert_close(found, TorchOps().mix_experts(x, experts, chosen, weights))


def test_numbers_are_rounded_where_torch_rounds_them() -> None:
    """Nearly: the interpreter cuts bf16 off where a GPU rounds to the nearest."""
    experts, (x, chosen, weights) = experts_of(torch.bfloat16), step_of(40, torch.bfloat16)
    found = TritonOps().mix_experts(x, experts, chosen, weights).float()
    wanted = TorchOps().mix_experts(x, experts, chosen, weights).float()
    assert (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.slow
def test_it_fits_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-30B-A3B's sizes, for a decode and a prompt: nothing is spilled."""
    recorder = LaunchRecorder(triton_experts._expert_gemm)
    monkeypatch.setattr(triton_experts, "_expert_gemm", recorder)
    shape = SparseShape(768, Routing(128, 8))
    experts = Experts(2048, shape, Builder(torch.bfloat16, ALONE)).to_empty(device="cpu")
    for num_tokens in (8, 1024):
        x = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16)
        chosen = torch.rand(num_tokens, 128).topk(8).indices
        TritonOps().mix_experts(x, experts, chosen, torch.ones(num_tokens, 8))
    builds = recorder.builds
    assert len(builds) == 4
    for used in compile_all_for_sm90(builds):
        assert used.spill_bytes == 0
        assert used.shared_bytes <= MAX_SHARED_BYTES
