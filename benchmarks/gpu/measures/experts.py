"""Checks the grouped GEMM of experts, in the sizes of Qwen3-30B-A3B, against fp32 and its limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import LIMITS, row_error
from engine.worker.models.builder import Builder
from engine.worker.models.moe import Experts
from engine.worker.models.shape import Routing, SparseShape
from engine.worker.parallel.group import ALONE

_TIMED_CALLS = 10
Mix = Callable[[], torch.Tensor]


def check(bench: Bench) -> None:
    """Checks decodes and a prompt: few experts, all experts with a row or two each, and full tiles."""
    from engine.worker.gpu.triton_ops import TritonOps

    toy = bench.sizes.toy
    hidden, inner, num_experts, per_token = (64, 32, 4, 2) if toy else (2048, 768, 128, 8)
    dtype = torch.float16 if toy else torch.bfloat16
    ops = TritonOps()
    where = bench.device.where
    generator = torch.Generator(where).manual_seed(0)
    shape = SparseShape(inner, Routing(num_experts, per_token))
    experts = Experts(hidden, shape, Builder(dtype, ALONE)).to_empty(device=where).requires_grad_(False)
    experts.gate_up.normal_(0, hidden**-0.5, generator=generator)
    experts.down.normal_(0, inner**-0.5, generator=generator)
    for num_tokens in (1, *bench.sizes.decode_batches[1:], bench.sizes.fused_tokens):
        name = f"experts of {num_tokens:,} tokens"
        x = torch.randn(num_tokens, hidden, generator=generator, device=where, dtype=dtype)
        scores = torch.rand(num_tokens, num_experts, generator=generator, device=where)
        weights, chosen = scores.topk(per_token)
        with bench.case(name):
            found = ops.mix_experts(x, experts, chosen, weights)
            error = row_error(found, _definition(experts, x, chosen, weights))
            bench.check(name, error, bench.sizes.slack * LIMITS[dtype])
            mix = partial(ops.mix_experts, x, experts, chosen, weights)
            _time(bench, f"{name}, a layer of {'a toy' if toy else 'Qwen3-30B-A3B'}", mix, experts, chosen)


def _definition(
    experts: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Computes the experts in fp32, one by one."""
    output = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(experts.gate_up)):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ experts.gate_up[expert].float().T).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate) * up) @ experts.down[expert].float().T
        output.index_add_(0, tokens, made * weights[tokens, places, None])
    return output


def _time(bench: Bench, name: str, mix: Mix, experts: Experts, chosen: torch.Tensor) -> None:
    """Times it against reading the weights of the chosen experts, or multiplying by them."""
    numbers_each = experts.gate_up[0].numel() + experts.down[0].numel()
    num_chosen = int(torch.bincount(chosen.flatten()).count_nonzero())
    read_s = num_chosen * numbers_each * experts.gate_up.itemsize / bench.rates.copy_bytes_s
    multiplied_s = 2 * chosen.numel() * numbers_each / bench.rates.matmul_flop_s
    seconds = bench.repeats_of_kernels(mix, _TIMED_CALLS)
    bench.figure(
        name,
        "us",
        [1e6 * each for each in seconds],
        floor=1e6 * max(read_s, multiplied_s),
    )
