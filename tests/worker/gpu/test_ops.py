"""The elementwise ops between a decoder's GEMMs: torch's against transformers, kernels against torch's."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from engine.worker.gpu.kv_write import HeadNorms, KVWrite
from engine.worker.gpu.ops import FusedOps, select_ops
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_ops import TritonOps, _rms_norm, _rope_and_write, _swiglu
from tests.worker.gpu.sm90 import KernelBuild, compile_all_for_sm90

EPS = 1e-6
BLOCK_SIZE = 16
NUM_BLOCKS = 4
MAX_POSITIONS = 50
SLOTS = (BLOCK_SIZE, -1, BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE)
"""Slots of five tokens; the second has no slot."""


@dataclass(frozen=True, slots=True)
class RopeCase:
    """Five tokens of a model of these sizes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None

    def run(
        self, ops: FusedOps, pool_dtype: torch.dtype | None = None, kv_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries; the pool [num_blocks, layers, 2, block_size, num_kv_heads, head_dim] after it."""
        pool = torch.ones(NUM_BLOCKS, 3, 2, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        pool = pool.to(pool_dtype or self.dtype)
        write = KVWrite(pool[:, 1, 0], pool[:, 1, 1], torch.tensor(SLOTS), kv_scale)
        norms = None if self.norms is None else HeadNorms(*self.norms, EPS)
        query = ops.rope_and_write(self.qkv, self.cos_sin, self.positions, write, norms)
        return query, pool


def rope_case(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, norm: bool
) -> RopeCase:
    torch.manual_seed(0)
    angles = torch.rand(MAX_POSITIONS, head_dim // 2) * 6
    return RopeCase(
        num_heads,
        num_kv_heads,
        head_dim,
        dtype,
        qkv=torch.randn(len(SLOTS), (num_heads + 2 * num_kv_heads) * head_dim).to(dtype),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype),
        positions=torch.tensor([0, 3, 7, MAX_POSITIONS - 1, 1]),
        norms=(torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if norm else None,
    )


def rms_norm_of_transformers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = Qwen3RMSNorm(len(weight), EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    result: torch.Tensor = norm(x)
    return result


def test_twin_normalizes_as_transformers_does_to_the_last_bit() -> None:
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((5, 96), (5, 96), (96,)))
    normed, total = TorchOps().rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_of_transformers(x + residual, weight))
    alone, same = TorchOps().rms_norm(x, weight, EPS)
    assert same is x
    assert torch.equal(alone, rms_norm_of_transformers(x, weight))


@pytest.mark.parametrize("norm", [False, True])
def test_twin_rotates_as_transformers_does_to_the_last_bit(norm: bool) -> None:
    case = rope_case(6, 2, 32, torch.bfloat16, norm=norm)
    query, pool = case.run(TorchOps())
    q, k, v = torch.split(case.qkv.view(len(SLOTS), -1, case.head_dim), [6, 2, 2], dim=1)
    if case.norms is not None:
        q, k = rms_norm_of_transformers(q, case.norms[0]), rms_norm_of_transformers(k, case.norms[1])
    cos, sin = case.cos_sin[case.positions].repeat_interleave(2, dim=0).view(len(SLOTS), 2, -1).chunk(2, -1)
    wide_cos, wide_sin = (half.reshape(1, len(SLOTS), -1) for half in (cos, sin))
    rotated = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], wide_cos, wide_sin)
    assert torch.equal(query, rotated[0][0].transpose(0, 1))
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            written = pool[slot // BLOCK_SIZE, 1, :, slot % BLOCK_SIZE]
            assert torch.equal(written, torch.stack((rotated[1][0, :, token], v[token])))


def test_twin_gates_as_transformers_does_to_the_last_bit() -> None:
    gate, up = torch.randn(2, 5, 48).bfloat16()
    assert torch.equal(TorchOps().swiglu(torch.cat((gate, up), dim=-1)), silu(gate) * up)


@pytest.mark.parametrize("ops", [TorchOps(), TritonOps()], ids=["twin", "kernel"])
def test_only_slots_of_the_step_in_one_layer_are_written(ops: FusedOps) -> None:
    _, pool = rope_case(4, 2, 64, torch.float32, norm=False).run(ops)
    written = (pool != 1).any(dim=-1).all(dim=-1)
    places = {(block, layer, kind, place) for block, layer, kind, place in written.nonzero().tolist()}
    slots = [slot for slot in SLOTS if slot >= 0]
    assert places == {(slot // BLOCK_SIZE, 1, kind, slot % BLOCK_SIZE) for slot in slots for kind in (0, 1)}
    assert torch.equal(pool[~written], torch.ones_like(pool[~written]))


@pytest.mark.parametrize("ops", [TorchOps(), TritonOps()], ids=["twin", "kernel"])
def test_pool_of_8_bits_holds_scaled_keys_and_values_and_the_largest_for_what_is_beyond(
    ops: FusedOps,
) -> None:
    case = rope_case(2, 1, 64, torch.float32, norm=False)
    scale = 0.5
    exact = torch.linspace(-7, 7, 15)[torch.randint(15, case.qkv.shape)]  # exact in eight bits
    exact[0, -1] = 1000.0
    unturned = torch.cat((torch.ones(MAX_POSITIONS, 32), torch.zeros(MAX_POSITIONS, 32)), dim=-1)
    case = RopeCase(2, 1, 64, torch.float32, exact, unturned, case.positions, None)
    query, pool = case.run(ops, torch.float8_e4m3fn, scale)
    assert query.dtype == torch.float32
    largest = torch.finfo(torch.float8_e4m3fn).max * scale
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            written = pool[slot // BLOCK_SIZE, 1, :, slot % BLOCK_SIZE].float() * scale
            assert torch.equal(written.flatten(), exact[token, 2 * 64 :].clamp(max=largest))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.0), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "norm"),
    [(4, 2, 64, True), (3, 3, 48, False), (14, 2, 64, False)],
)
def test_kernel_rotates_and_writes_what_the_twin_does(
    num_heads: int, num_kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """The interpreter rounds fp16 as a GPU does (and truncates bf16): equal bits mean equal roundings."""
    case = rope_case(num_heads, num_kv_heads, head_dim, dtype, norm=norm)
    for twin, kernel in zip(case.run(TorchOps()), case.run(TritonOps()), strict=True):
        torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.0), (torch.float32, 2e-6)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_kernel_normalizes_as_the_twin_does(
    with_residual: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((3, 96), (3, 96), (96,)))
    arguments = (x, weight, EPS, residual if with_residual else None)
    for twin, kernel in zip(TorchOps().rms_norm(*arguments), TritonOps().rms_norm(*arguments), strict=True):
        torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2.0**-10), (torch.float32, 2e-6)])
def test_kernel_gates_as_the_twin_does(dtype: torch.dtype, tolerance: float) -> None:
    """The gates of kernel and torch agree up to the last bit: torch's exponential is another one."""
    gate_up = torch.randn(3, 2 * 1500).to(dtype)
    torch.testing.assert_close(
        TritonOps().swiglu(gate_up), TorchOps().swiglu(gate_up), rtol=tolerance, atol=1e-6
    )


def test_triton_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert isinstance(select_ops(torch.device("cpu")), TritonOps)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert isinstance(select_ops(torch.device("cpu")), TorchOps)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert isinstance(select_ops(torch.device("cuda")), TorchOps)


def rope_build(num_heads: int, num_kv_heads: int, *, norm: bool, pool: str = "bf16") -> KernelBuild:
    """A build for a model with heads of 128 numbers and blocks of 16 tokens."""
    pointers = dict.fromkeys(("qkv", "cos_sin", "query"), "*bf16:16") | {
        "keys": f"*{pool}:16",
        "values": f"*{pool}:16",
        "positions": "*i64:16",
        "slots": "*i64:16",
    }
    strides = dict.fromkeys(("qkv_stride", "block_stride", "place_stride", "head_stride"), "i64:16")
    norms = {"q_norm": "*bf16:16", "k_norm": "*bf16:16"} if norm else {}
    return KernelBuild(
        _rope_and_write,
        pointers | strides | norms | {"eps": "fp32", "kv_factor": "fp32"},
        ({} if norm else {"q_norm": None, "k_norm": None})
        | {
            "BLOCK_SIZE": 16,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HALF": 64,
            "HALF_BLOCK": 64,
            "HEADS_EACH": 8,
            "HAS_NORM": norm,
        },
    )


def norm_build(size: int, block: int, num_warps: int, *, residual: bool = True) -> KernelBuild:
    names = ("x", "weight", "normed", "total", *(("residual",) if residual else ()))
    return KernelBuild(
        _rms_norm,
        dict.fromkeys(names, "*bf16:16") | {"x_stride": "i32:16", "eps": "fp32"},
        ({} if residual else {"residual": None}) | {"SIZE": size, "BLOCK": block, "HAS_RESIDUAL": residual},
        num_warps=num_warps,
    )


@pytest.mark.slow
def test_kernels_of_real_sizes_compile_for_a_hopper_gpu_and_stay_in_registers() -> None:
    builds = [
        rope_build(32, 8, norm=False),
        rope_build(32, 8, norm=False, pool="fp8e4nv"),
        rope_build(16, 8, norm=True),
        norm_build(4096, 4096, 8),
        norm_build(4096, 4096, 8, residual=False),
        norm_build(1024, 1024, 2),
        norm_build(5120, 8192, 16),
        KernelBuild(
            _swiglu,
            {"gate_up": "*bf16:16", "gated": "*bf16:16", "gate_up_stride": "i32:16"},
            {"INNER": 14336, "BLOCK": 1024},
        ),
    ]
    for build, resources in zip(builds, compile_all_for_sm90(builds), strict=True):
        assert resources.spill_bytes == 0, build
        assert resources.registers <= 64, build
