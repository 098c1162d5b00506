"""Attention over latents against its definition in fp64, and the size of latents in the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.records.kv_cache_groups import one_group
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.selection import select_attention
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.executor import UniProcExecutor
from tests.worker.attention_reference import (
    LAYER,
    MIXED_LENGTHS,
    AttentionCase,
    make_case,
    reference_output,
)
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens

VALUE_SIZE = 48
LONG = (*MIXED_LENGTHS[:4], (1, 700), (40, 40), (33, 600), (300, 900))
BACKENDS: dict[str, tuple[Callable[[torch.Tensor], AttentionBackend], torch.dtype]] = {
    "torch": (TorchPagedAttention, torch.float32),
    "torch in bf16": (TorchPagedAttention, torch.bfloat16),
    "compiled": (partial(select_attention, resolved="auto"), torch.float32),
    "compiled in bf16": (partial(select_attention, resolved="auto"), torch.bfloat16),
}


def latent_case(
    dtype: torch.dtype,
    lengths: tuple[tuple[int, int], ...] = MIXED_LENGTHS,
    *,
    num_heads: int = 6,
    latent_size: int = 64,
    block_size: int = 8,
    seed: int = 0,
) -> AttentionCase:
    """A case whose pool holds latents, and NaN outside of sequences."""
    case = make_case(
        num_kv_heads=1,
        dtype=dtype,
        lengths=lengths,
        num_heads=num_heads,
        head_dim=latent_size,
        block_size=block_size,
        seed=seed,
    )
    pool = torch.full_like(case.pool[:, :, :1], torch.nan)
    pool[0] = 0  # the null block
    for row, (query_len, seq_len) in enumerate(lengths):
        positions = np.arange(seq_len - query_len)
        blocks, offsets = case.batch.block_tables[row, positions // block_size], positions % block_size
        pool[blocks, LAYER, 0, offsets] = case.pool[blocks, LAYER, 0, offsets]
    return replace(case, pool=pool)


def latent_output(
    case: AttentionCase, backend: Callable[[torch.Tensor], AttentionBackend], value_size: int = VALUE_SIZE
) -> torch.Tensor:
    """The output of a backend over the case's pool, in fp64."""
    attention = backend(case.pool)
    attention.begin_step(case.batch)
    scale = case.query.shape[-1] ** -0.5
    output = attention.attend_latent(LAYER, case.query, case.key[:, 0], value_size=value_size, scale=scale)
    assert output.shape == (*case.query.shape[:2], value_size)
    return output.double().cpu()


def latent_reference(case: AttentionCase, value_size: int = VALUE_SIZE) -> torch.Tensor:
    """Attention with the latents as keys and values."""
    both = replace(case, sequences=[(key, key) for key, _ in case.sequences])
    return reference_output(both, None)[..., :value_size]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_heads", [1, 6, 40])
def test_values_are_the_first_numbers_of_latents(name: str, num_heads: int) -> None:
    """Decodes, fresh prompts and chunks after a context are right, with NaN in all unwritten memory."""
    backend, dtype = BACKENDS[name]
    case = latent_case(dtype, LONG, num_heads=num_heads)
    error = (latent_output(case, backend) - latent_reference(case)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


def test_what_is_written_is_the_latent() -> None:
    """A latent is written at the slots of the step's tokens, for one layer only."""
    case = latent_case(torch.float32)
    before = case.pool.clone()
    latent_output(case, TorchPagedAttention)
    batch = case.batch
    written = case.pool[batch.slot_blocks, LAYER, 0, batch.slot_offsets]
    assert torch.equal(written, case.key)
    case.pool[batch.slot_blocks, LAYER, 0, batch.slot_offsets] = torch.nan
    assert torch.equal(case.pool.isnan(), before.isnan())


def test_a_latent_is_one_vector_of_a_block() -> None:
    """DeepSeek-V3's has 576 numbers a token and layer; keys and values of 128 heads would have 40,960."""
    layers = one_group(61)
    latents = KvCacheSpec(layers, 1, 512 + 64, torch.bfloat16, block_size=16, num_vectors=1)
    assert latents.bytes_per_block == 61 * 576 * 2 * 16
    pool = latents.allocate(3, torch.device("cpu"))
    assert pool.shape == (3, 61, 1, 16, 1, 576)
    assert pool[0].nbytes == latents.bytes_per_block
    all_heads = 61 * 128 * (128 + 64 + 128) * 2 * 16
    assert latents.bytes_per_block / all_heads == pytest.approx(0.014, abs=1e-3)


def test_a_pool_of_so_many_bytes_holds_that_many_latents(model_folders: ModelFolders) -> None:
    """``kv_cache_memory_bytes`` is used to the byte; latents take a third of KV of four heads."""
    per_block = 4 * 64 * 4 * 16
    """Layers, numbers of a latent, bytes and tokens."""
    info = UniProcExecutor(
        EngineConfig(
            model=ModelConfig(model=str(model_folders("deepseek-v3")), max_model_len=256),
            cache=CacheConfig(block_size=16, kv_cache_memory_bytes=50 * per_block + per_block - 1),
        )
    ).info
    assert info.num_gpu_blocks == 50
    (group,) = info.kv_cache_groups
    assert group.is_full, "to the core, latents are full attention"
    all_heads = 4 * 4 * (12 + 16 + 20) * 4 * 16
    assert per_block / all_heads == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3-halves"])
def test_in_bf16_the_best_tokens_are_as_probable(name: str, model_folders: ModelFolders) -> None:
    """Up to rounding they are as probable as with transformers in fp32: in a prompt of two chunks and in
    decodes, by compiled code where possible."""
    folder = model_folders(name)
    prompt = random_tokens(40, seed=2)
    engine = SmallEngine(folder, dtype="bfloat16", max_num_batched_tokens=32)
    answer = engine.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=4)
    )
    (told,) = engine.logprobs.values()
    with torch.inference_mode():
        logits = Reference(folder).model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    for wanted, found in zip(logits.log_softmax(dim=-1), told, strict=True):
        assert found.logprobs == pytest.approx(wanted[found.token_ids].tolist(), abs=0.2)
