"""Attention over latents by the compiled kernel: with the CPU's own AMX, emulated AMX, and none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.cpu.attention_kernel import CpuKernel
from engine.worker.cpu.kernels.library import KernelUnavailable
from tests.worker.attention_reference import AttentionCase
from tests.worker.cpu.test_emulated_amx import TILES
from tests.worker.cpu.test_paged_attention import Kernels, backend_with, only, use_compiler
from tests.worker.test_latent_attention import latent_case, latent_output, latent_reference

pytestmark = pytest.mark.slow

HEAD_DIM, VALUE_SIZE = 96, 72
COMPILERS = {
    "as it is": 'exec c++ "$@"',
    "emulated tiles": f'exec c++ -include "{TILES}" "$@"',
    "no tiles": 'exec c++ "$@" -mno-amx-bf16 -mno-amx-tile -mno-amx-int8',
}


@pytest.fixture(
    scope="module", params=[*list(COMPILERS)[:2], pytest.param("no tiles", marks=pytest.mark.long)]
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    with pytest.MonkeyPatch.context() as patch:
        use_compiler(tmp_path_factory.mktemp("kernel"), patch, COMPILERS[request.param])
        try:
            kernel = CpuKernel.load(HEAD_DIM, torch.bfloat16)
        except KernelUnavailable as error:
            pytest.skip(f"there is no kernel: {error}")
    if not kernel.has_prefill:
        pytest.skip("the kernel for latents needs a CPU with AVX512_BF16")
    return lambda head_dim, dtype: kernel


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    """Decodes shortest first, with lengths around the bounds of parts, often followed by prompts."""
    near_parts = st.sampled_from((1, 256, 1023, 1024, 1025, 2048, 2049))
    lengths = sorted(draw(st.lists(near_parts | st.integers(1, 3000), max_size=4)))
    prompt = st.tuples(st.integers(2, 20) | st.integers(2, 200), st.integers(0, 1500))
    prompts = draw(st.lists(prompt, min_size=not lengths, max_size=2))
    return latent_case(
        torch.bfloat16,
        (*((1, n) for n in lengths), *((n, n + context) for n, context in prompts)),
        num_heads=draw(st.sampled_from((1, 3, 16, 40, 128))),
        latent_size=HEAD_DIM,
        block_size=draw(st.sampled_from((5, 16, 64))),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=20, deadline=None)
@given(case=cases(), num_threads=st.integers(1, 3))
def test_equals_the_reference_alone_as_in_company(
    kernels: Kernels, case: AttentionCase, num_threads: int
) -> None:
    """Results are within a few roundings, and have the same bits in any batch with any number of threads."""
    together = latent_output(case, backend_with(kernels), VALUE_SIZE)
    error = (together - latent_reference(case, VALUE_SIZE)).abs().max()
    assert error <= 1e-5 + 4 * torch.finfo(torch.bfloat16).eps
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        starts = case.batch.query_lens.cumsum() - case.batch.query_lens
        for row in range(len(starts)):
            tokens = slice(starts[row], starts[row] + case.batch.query_lens[row])
            alone = latent_output(only(case, row, tokens), backend_with(kernels), VALUE_SIZE)
            assert torch.equal(alone, together[tokens])
    finally:
        torch.set_num_threads(before)


def test_a_prefix_that_sequences_share_changes_no_bit(kernels: Kernels) -> None:
    """Sequences attend to the shared parts one after another, so that these are read once."""
    case = latent_case(
        torch.bfloat16, ((1, 2100), (1, 2500), (1, 3000)), num_heads=20, latent_size=HEAD_DIM, block_size=16
    )
    case.batch.block_tables[:, :129] = case.batch.block_tables[2, :129]
    together = latent_output(case, backend_with(kernels), VALUE_SIZE)
    for row in range(3):
        alone = latent_output(only(case, row, slice(row, row + 1)), backend_with(kernels), VALUE_SIZE)
        assert torch.equal(alone, together[row : row + 1])
    sequences = [(key.clone(), value) for key, value in case.sequences]
    for key, _ in sequences[:2]:
        key[: 129 * 16] = case.sequences[2][0][: 129 * 16]
    shared = AttentionCase(case.batch, case.pool, case.query, case.key, case.value, sequences)
    error = (together - latent_reference(shared, VALUE_SIZE)).abs().max()
    assert error <= 1e-5 + 4 * torch.finfo(torch.bfloat16).eps
