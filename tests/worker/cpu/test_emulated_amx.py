"""The compiled code as it runs on CPUs with AMX: AMX is emulated, on any CPU with AVX512_BF16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_experts import packed_experts
from engine.worker.cpu.packed_weights import interleaved_linear
from tests.worker.attention_reference import AttentionCase, paged_output, reference_output
from tests.worker.cpu.test_packed_experts import distance, experts_of, rows_of
from tests.worker.cpu.test_paged_attention import Kernels, backend_with, cases, only, use_compiler, windows

pytestmark = pytest.mark.slow

HEAD_DIM = 64
TILES = Path(__file__).with_name("emulated_amx.h")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Libraries loaded during these tests are compiled with emulated AMX."""
    with pytest.MonkeyPatch.context() as patch:
        use_compiler(tmp_path_factory.mktemp("tiles"), patch, f'exec c++ -include "{TILES}" "$@"')
        yield


@pytest.fixture(scope="module")
def gemm(libraries: None) -> CompiledGemm:
    try:
        return CompiledGemm.load(HEAD_DIM)
    except KernelUnavailable as error:
        pytest.skip(f"there is no compiled GEMM: {error}")


@pytest.fixture(scope="module")
def kernels(gemm: CompiledGemm) -> Kernels:
    kernel = CpuKernel.load(HEAD_DIM, torch.bfloat16)
    return lambda head_dim, dtype: kernel


@settings(max_examples=40, deadline=None)
@given(case=cases([(HEAD_DIM, torch.bfloat16)]), window=windows)
def test_attention_equals_the_reference(kernels: Kernels, case: AttentionCase, window: int | None) -> None:
    """Any lengths, block sizes, windows and head groups give the right result, alone with the same bits."""
    wanted = reference_output(case, window)
    got = paged_output(case, window, backend_with(kernels))
    assert (got - wanted).abs().max() <= 1e-5 + 4 * torch.finfo(torch.bfloat16).eps
    starts = case.batch.query_lens.cumsum() - case.batch.query_lens
    tokens = slice(starts[-1], starts[-1] + case.batch.query_lens[-1])
    alone = paged_output(only(case, len(starts) - 1, tokens), window, backend_with(kernels))
    assert torch.equal(alone, got[tokens])


@pytest.mark.parametrize("num_rows", [1, 9, 150])
def test_experts_are_those_of_torch(num_rows: int, gemm: CompiledGemm) -> None:
    """Sums are right for an expert with one row and for one with more than two tiles."""
    packed, wide = packed_experts(experts_of(), gemm), experts_of().float()
    x, experts, weights = rows_of(num_rows, seed=1, skewed=True)
    assert distance(packed(x, experts, weights), wide(x.float(), experts, weights)) < 0.008


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 33, 65, 129])
def test_a_product_is_the_plain_one(num_rows: int, gemm: CompiledGemm) -> None:
    """Products are right for rows that fill tiles and rows that do not."""
    plain = nn.Linear(1056, 200, dtype=torch.bfloat16)
    x = torch.randn(num_rows, 1056).bfloat16()
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    found = interleaved_linear(plain, gemm)(x)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=1e-2)
