"""The compiled code as CPUs with tiles (AMX) run it: tiles are emulated, wherever bf16 has products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.kernels.weights import CompiledProduct
from engine.worker.cpu.packed_weights import interleaved_linear
from tests.worker.attention_reference import AttentionCase, paged_output, reference_output
from tests.worker.cpu.test_paged_attention import Kernels, backend_with, cases, only, use_compiler, windows

HEAD_DIM = 64
TILES = Path(__file__).with_name("emulated_amx.h")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is loaded meanwhile was compiled with emulated tiles."""
    with pytest.MonkeyPatch.context() as patch:
        use_compiler(tmp_path_factory.mktemp("tiles"), patch, f'exec c++ -include "{TILES}" "$@"')
        yield


@pytest.fixture(scope="module")
def product(libraries: None) -> CompiledProduct:
    try:
        return CompiledProduct.load(HEAD_DIM)
    except KernelUnavailable as error:
        pytest.skip(f"there are no compiled products: {error}")


@pytest.fixture(scope="module")
def kernels(product: CompiledProduct) -> Kernels:
    kernel = CpuKernel.load(HEAD_DIM, torch.bfloat16)
    return lambda head_dim, dtype: kernel


@settings(max_examples=40, deadline=None)
@given(case=cases([(HEAD_DIM, torch.bfloat16)]), window=windows)
def test_attention_equals_the_reference(kernels: Kernels, case: AttentionCase, window: int | None) -> None:
    """At any lengths, sizes of blocks, windows and groupings of heads; one alone gets the same bits."""
    wanted = reference_output(case, window)
    got = paged_output(case, window, backend_with(kernels))
    assert (got - wanted).abs().max() <= 1e-5 + 4 * torch.finfo(torch.bfloat16).eps
    starts = case.batch.query_lens.cumsum() - case.batch.query_lens
    tokens = slice(starts[-1], starts[-1] + case.batch.query_lens[-1])
    alone = paged_output(only(case, len(starts) - 1, tokens), window, backend_with(kernels))
    assert torch.equal(alone, got[tokens])


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 33, 65, 129])
def test_a_product_is_the_plain_one(num_rows: int, product: CompiledProduct) -> None:
    """For rows that fill tiles and rows that do not."""
    plain = nn.Linear(1056, 200, dtype=torch.bfloat16)
    x = torch.randn(num_rows, 1056).bfloat16()
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    found = interleaved_linear(plain, product)(x)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=1e-2)
