"""Attention over latents on a GPU's path, in Triton's interpreter, and its kernel's resources on a Hopper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.gpu import triton_attention
from engine.worker.gpu.kv_splits import Splits, SplitScratch
from engine.worker.gpu.step_batch import StepBatch
from engine.worker.gpu.tiling import Tiling, latent_tiling
from engine.worker.gpu.triton_attention import Scoring, attend_latents
from engine.worker.gpu.triton_attention_kernels import latent_kernel, merge_kernel
from engine.worker.gpu.triton_paged import TritonPagedAttention
from tests.worker.attention_reference import LAYER, AttentionCase
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.gpu.sm90 import MAX_SHARED_BYTES, LaunchRecorder, compile_all_for_sm90
from tests.worker.gpu.test_triton_attention import in_8_bits
from tests.worker.test_latent_attention import latent_case, latent_output, latent_reference

pytestmark = pytest.mark.slow


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    """Decodes shortest first, often followed by prompts; a latent's size is not a power of two."""
    decodes = sorted(draw(st.lists(st.integers(1, 150), max_size=2)))
    chunks = st.tuples(st.integers(2, 40), st.integers(0, 100))
    prompts = draw(st.lists(chunks, min_size=not decodes, max_size=2))
    return latent_case(
        draw(st.sampled_from((torch.float32, torch.bfloat16))),
        (*((1, n) for n in decodes), *((n, n + context) for n, context in prompts)),
        num_heads=draw(st.sampled_from((1, 4, 20))),
        latent_size=draw(st.sampled_from((56, 64, 80))),
        block_size=draw(st.sampled_from((1, 5, 16, 64))),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_a_step_equals_the_reference(case: AttentionCase) -> None:
    """Decodes and prompts are right, with NaN in all unwritten memory."""
    error = (latent_output(case, TritonPagedAttention) - latent_reference(case)).abs().max()
    assert error < max(1e-5, 4 * torch.finfo(case.pool.dtype).eps)


def test_latents_in_8_bits() -> None:
    """Decodes and prompts convert them as they are read, with their scale."""
    kv_scale = 0.25
    case = latent_case(torch.float32, ((1, 40), (1, 90), (20, 70)))
    sequences = [(in_8_bits(key, kv_scale), value) for key, value in case.sequences]
    case = replace(case, key=in_8_bits(case.key, kv_scale), sequences=sequences)
    narrow = replace(case, pool=(case.pool / kv_scale).to(torch.float8_e4m3fn))
    got = latent_output(narrow, partial(TritonPagedAttention, kv_scale=kv_scale))
    assert (got - latent_reference(case)).abs().max() < 1e-5


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("page", "tile"), [(16, 64), (64, 32), (12, 16)])
def test_drafts_beside_an_empty_place(page: int, tile: int, num_splits: int) -> None:
    """Each new token sees those before it, split or not; a graph's place without a sequence gets zeros."""
    case = latent_case(torch.float32, ((3, 390), (3, 3), (3, 140)), num_heads=12, block_size=page)
    batch, latents = case.batch, case.pool[:, LAYER, 0]
    latents[batch.slot_blocks, batch.slot_offsets] = case.key
    step = StepBatch(
        rows=torch.tensor([0, 1, 2, 0], dtype=torch.int32),
        query_starts=torch.arange(0, 13, 3, dtype=torch.int32),
        seq_lens=torch.tensor([*batch.seq_lens, 0], dtype=torch.int32),
        block_tables=torch.from_numpy(batch.block_tables).int(),
        positions=torch.empty(0, dtype=torch.int64),
        slots=torch.empty(0, dtype=torch.int64),
        num_uniform=4,
        uniform_len=3,
        max_uniform_seq_len=390,
    )
    query = torch.cat((case.query, torch.zeros_like(case.query[:3])))
    output = torch.full((12, 12, 48), torch.nan)
    splits = Splits(num_splits, 32, SplitScratch.allocate(64, torch.device("cpu")))
    attend_latents(output, query, latents, step, Scoring(64**-0.5), Tiling(16, tile, 4, 2), splits)
    assert (output[:9].double() - latent_reference(case)).abs().max() < 1e-5
    assert not output[9:].any()


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "deepseek-v3.2", "glm-5"])
def test_tokens_are_those_of_transformers(name: str, model_folders: ModelFolders) -> None:
    """An engine on Triton's kernels gives the tokens; the second turn hits the latents of the first."""
    folder: Path = model_folders(name)
    reference, greedy = Reference(folder), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [random_tokens(33, seed=1), random_tokens(2, seed=2)]
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        max_model_len=128,
        num_gpu_blocks_override=16,
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == reference.greedy(prompt, 3)
            prompts = [prompts[0] + [*outputs[0].outputs[0].token_ids, 7]]


@pytest.mark.parametrize(
    ("num_heads", "shared_bytes"), [(16, MAX_SHARED_BYTES), (128, MAX_SHARED_BYTES), (128, 99 * 1024)]
)
@pytest.mark.parametrize("size", [576, 704], ids=["", "with an indexer"])
def test_it_fits_on_a_gpu(
    num_heads: int, shared_bytes: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the heads of DeepSeek-V2-Lite, V3 and V3.2 the kernel fits on a Hopper and on other GPUs. Nothing
    is spilled but a few numbers by tiles of 64 rows, which on an H200 took half the time of those of 16."""
    recorder = LaunchRecorder(latent_kernel)
    monkeypatch.setattr(triton_attention, "latent_kernel", recorder)
    monkeypatch.setattr(triton_attention, "merge_kernel", LaunchRecorder(merge_kernel))
    meta = torch.device("meta")
    numbers = torch.empty(64, dtype=torch.int32, device=meta)
    places = torch.empty(64, dtype=torch.int64, device=meta)
    tables = torch.empty((64, 512), dtype=torch.int32, device=meta)
    step = StepBatch(numbers, numbers, numbers, tables, places, places, 64, 1, 8192)
    attend_latents(
        torch.empty((64, num_heads, 512), dtype=torch.bfloat16, device=meta),
        torch.empty((64, num_heads, size), dtype=torch.bfloat16, device=meta),
        torch.empty((100, 61, 1, 16, 1, size), dtype=torch.bfloat16, device=meta)[:, 0, 0],
        step,
        Scoring(0.1),
        latent_tiling(num_heads, shared_bytes, size - 512),
        Splits(8, 128, SplitScratch.allocate(size, meta)),
    )
    for used in compile_all_for_sm90(recorder.builds):
        assert used.spill_bytes <= (96 if used.shared_bytes > 99 * 1024 else 0)
        assert used.shared_bytes <= shared_bytes
