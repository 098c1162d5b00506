"""Packed weights compute the same as plain ones, in equal memory, and are not required."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.config.engine_config import ModelConfig
from engine.worker.cpu.onednn_linear import OneDNNEmbedding, OneDNNLinear, OneDNNWeight, can_pack
from engine.worker.cpu.packed_weights import PackedEmbedding, compiled_gemm
from engine.worker.loading.loader import load_model
from engine.worker.models.decoder import Decoder
from engine.worker.models.linears import Embedding
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.bfloat16,) if can_pack(CPU, dtype)]
TABLES = [dtype for dtype in DTYPES if OneDNNWeight(torch.randn(64, 100).to(dtype)).block is not None]
"""The dtypes whose layout allows looking up vectors; without AVX512_BF16 oneDNN may choose another one."""


@pytest.fixture
def without_onednn() -> Iterator[None]:
    onednn: Any = torch.backends.mkldnn
    onednn.enabled = False
    yield
    onednn.enabled = True


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 8, 33, 300])
def test_a_packed_product_is_the_plain_one(num_rows: int, dtype: torch.dtype) -> None:
    """Products are right for any number of rows, with and without bias, and for sizes that fill no block."""
    generator = torch.Generator().manual_seed(num_rows)
    for num_inputs, num_outputs in ((256, 512), (100, 1003)):
        weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
        x, bias = torch.randn(num_rows, num_inputs, generator=generator).to(dtype), weight[:, 0].clone()
        for given in (bias, None):
            plain = torch.nn.functional.linear(x, weight, given)
            torch.testing.assert_close(OneDNNLinear(weight, given)(x), plain, rtol=2e-2, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TABLES)
@pytest.mark.parametrize("num_vectors", [64, 1003])
def test_a_packed_table_is_still_a_table(num_vectors: int, dtype: torch.dtype) -> None:
    """Each vector is looked up bit for bit, and multiplied as in the plain table."""
    weight = torch.randn(num_vectors, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, packed = Embedding(torch.nn.Parameter(weight, requires_grad=False)), OneDNNEmbedding(weight)
    ids = torch.arange(num_vectors).flip(0)
    assert torch.equal(packed(ids), weight[ids])
    x = weight[:5]
    torch.testing.assert_close(packed.logits(x), plain.logits(x), rtol=2e-2, atol=1e-3)


def test_a_weight_is_held_once(tmp_path: Path) -> None:
    """A model whose embedding is also its head takes the memory of its parameters, packed or not."""
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32768,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path)
    num_bytes = 2 * sum(p.numel() for p in Decoder(config, torch.bfloat16).parameters())
    before = resident_bytes()
    loaded = load_model(ModelConfig(model=str(tmp_path), load_format="dummy", dtype="bfloat16"))
    assert resident_bytes() - before < 1.2 * num_bytes
    assert isinstance(loaded.model, Decoder)
    gemm = compiled_gemm(64, CPU, torch.bfloat16)
    packed = OneDNNEmbedding if TABLES else Embedding
    assert isinstance(loaded.model.embedding, packed if gemm is None else PackedEmbedding)


@pytest.mark.usefixtures("without_onednn")
def test_nothing_needs_onednn(model_folders: ModelFolders) -> None:
    """With oneDNN disabled the model loads, its weights stay plain, and its tokens are the same."""
    folder, prompt = model_folders("llama-yarn-tied"), random_tokens(30, seed=1)
    model = load_model(ModelConfig(model=str(folder))).model
    assert isinstance(model, Decoder)
    assert isinstance(model.embedding, Embedding)
    assert SmallEngine(folder).generate(prompt) == Reference(folder).greedy(prompt, 24)


def test_a_type_that_cannot_be_packed_is_served(model_folders: ModelFolders) -> None:
    """float16, which few CPUs multiply in packed form, works like any other type."""
    engine = SmallEngine(model_folders("llama"), dtype="float16")
    assert len(engine.generate(random_tokens(20, seed=2))) == 24
