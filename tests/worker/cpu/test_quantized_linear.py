"""Weights quantized to 8 and 4 bits follow the format, and a whole model equals transformers' own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_weights import compiled_gemm, interleaved_linear
from engine.worker.cpu.quantization import GROUP_SIZE
from engine.worker.cpu.quantized_linear import (
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    can_keep,
    int4_linear,
    int8_embedding,
    int8_linear,
)
from engine.worker.loading.loader import load_model
from engine.worker.models.decoder import Decoder
from engine.worker.models.linears import Embedding
from tests.worker.conftest import ModelFolders
from tests.worker.cpu.quantizing import round_weights, rounded
from tests.worker.cpu.test_onednn_linear import resident_bytes
from tests.worker.generation import Reference, random_tokens

WITHIN = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
"""The allowed error of a result against 64 bits: relative, absolute."""
DTYPES = tuple(WITHIN)
CPU = torch.device("cpu")


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    relative, absolute = WITHIN[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=absolute)


def made(num_outputs: int, num_inputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(num_outputs)
    return nn.Linear(num_inputs, num_outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.fixture(params=["torch", "compiled"])
def gemm(request: pytest.FixtureRequest) -> CompiledGemm | None:
    """The compiled GEMM, or None for torch."""
    if request.param == "torch":
        return None
    found: CompiledGemm = request.getfixturevalue("compiled")
    return found


def types_of(gemm: CompiledGemm | None) -> tuple[torch.dtype, ...]:
    return DTYPES if gemm is None else (torch.bfloat16,)


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [0, 1, 6, 7, 8, 12, 13, 17, 33, 64, 65, 300])
def test_a_product_is_that_of_the_rounded_weight(num_rows: int, gemm: CompiledGemm | None) -> None:
    """Products are right for any number of rows, with and without bias, for all sizes."""
    for dtype in types_of(gemm):
        for num_outputs, num_inputs in ((64, 256), (1003, 96), (96, 320)):
            plain = made(num_outputs, num_inputs, dtype)
            without_bias = made(num_outputs, num_inputs, dtype, bias=False)
            x = torch.randn(num_rows, num_inputs).to(dtype)
            for bits, linear in ((8, int8_linear), (4, int4_linear)):
                if gemm is None and num_outputs % 16:
                    bits = 8  # torch has no int4 GEMM for these
                weight = rounded(plain.weight, bits, num_inputs if bits == 8 else GROUP_SIZE)
                found = linear(plain, gemm)(x)
                assert found.dtype == dtype
                assert_near(found, x.double() @ weight.T + plain.bias.double(), dtype)
                assert_near(linear(without_bias, gemm)(x), x.double() @ weight.T, dtype)


@torch.inference_mode()
def test_the_bits_of_a_row_are_its_own(compiled: CompiledGemm) -> None:
    """A row gets the same bits alone, among few and among many, with any number of threads (not in torch)."""
    plain = made(192, 640, torch.bfloat16)
    x = torch.randn(600, 640).bfloat16()
    before = torch.get_num_threads()
    products: tuple[nn.Module, ...] = (
        interleaved_linear(plain, compiled),
        int8_linear(plain, compiled),
        int4_linear(plain, compiled),
    )
    for linear in products:
        together = linear(x)
        try:
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                assert torch.equal(linear(x), together)
                for first, count in ((0, 1), (255, 5), (590, 10), (100, 64)):
                    assert torch.equal(linear(x[first : first + count]), together[first : first + count])
        finally:
            torch.set_num_threads(before)


def test_what_the_compiled_code_does_not_know_is_multiplied_by_torch(gemm: CompiledGemm | None) -> None:
    """Torch multiplies other types, and inputs that fill no group."""
    assert compiled_gemm(32, CPU, torch.float32) is None
    plain = made(64, 48, torch.bfloat16)
    assert isinstance(int8_linear(plain, gemm), Int8Linear)
    assert isinstance(int4_linear(plain, gemm), Int8Linear)
    table = Embedding(nn.Parameter(plain.weight, requires_grad=False))
    assert isinstance(int8_embedding(table, gemm), Int8Embedding)
    assert isinstance(int4_linear(made(64, 64, torch.bfloat16)), Int4Linear)


@torch.inference_mode()
def test_a_table_finds_what_it_multiplies_with(gemm: CompiledGemm | None) -> None:
    """Looked-up and multiplied vectors are the same quantized ones, although quantized in parts."""
    for dtype in types_of(gemm):
        weight = made(5003, 64, dtype).weight
        table = int8_embedding(Embedding(nn.Parameter(weight, requires_grad=False)), gemm)
        vectors = rounded(weight, 8, 64)
        ids = torch.arange(5003).flip(0)
        assert_near(table(ids), vectors[ids], dtype)
        for num_rows in (1, 5, 70):
            x = torch.randn(num_rows, 64).to(dtype)
            assert_near(table.logits(x), x.double() @ vectors.T, dtype)


@torch.inference_mode()
def test_nothing_but_zeros_stays_nothing(gemm: CompiledGemm | None) -> None:
    for dtype in types_of(gemm):
        plain = nn.Linear(64, 32, bias=False, dtype=dtype)
        nn.init.zeros_(plain.weight)
        for linear in (int8_linear(plain, gemm), int4_linear(plain, gemm)):
            assert not linear(torch.ones(2, 64, dtype=dtype)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "name"), [("int8", "qwen3"), ("int8", "qwen2"), ("int4", "llama-yarn-tied")]
)
def test_the_tokens_are_those_of_transformers(
    quantization: str, name: str, model_folders: ModelFolders
) -> None:
    """Tokens are transformers' with the same quantized weights, tied or not, with biases or without."""
    reference = Reference(model_folders(name))
    round_weights(reference.model, quantization, torch.float32)
    prompt = random_tokens(30, seed=3)
    with LLM(str(model_folders(name)), multiprocess=False, quantization=quantization) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == reference.greedy(prompt, 24)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.6), ("int4", 0.5)])
def test_rounded_weights_take_less_memory(quantization: str, share: float, tmp_path: Path) -> None:
    """Quantized weights take at most this share of 16-bit ones; head and embedding have 8 bits."""
    sizes = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 32768}
    config = AutoConfig.for_model(
        "qwen3", **sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True
    )
    config.save_pretrained(tmp_path)
    num_bytes = 2 * sum(p.numel() for p in Decoder(config, torch.bfloat16).parameters())
    _wait_for_pools_of_other_tests()
    before = resident_bytes()
    options = ModelConfig(
        model=str(tmp_path), load_format="dummy", dtype="bfloat16", quantization=quantization
    )
    loaded = load_model(options)
    assert resident_bytes() - before < share * num_bytes
    assert isinstance(loaded.model, Decoder)


def _wait_for_pools_of_other_tests() -> None:
    """Waits: pages of pools arrive in the background, and count as this process's memory."""
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()


def test_what_cannot_be_rounded_is_said(model_folders: ModelFolders) -> None:
    """An unknown kind, and weights that are no linears', are refused in one sentence that names the field."""
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, got 'int3'"):
        LLM(str(model_folders("llama")), quantization="int3")
    options: dict[str, Any] = {"quantization": "int8", "model_impl": "transformers"}
    with pytest.raises(ConfigError, match=r"quantization: int8 needs a model whose weights are those of lin"):
        LLM(str(model_folders("gpt-oss")), multiprocess=False, **options)


@pytest.mark.parametrize("num_inputs", [8, 20, 24, 56])
@pytest.mark.parametrize("quantize", [int8_linear, int4_linear])
def test_sizes_that_end_torch_s_gemm_are_left_as_they_are(
    quantize: Callable[[nn.Linear], nn.Module], num_inputs: int
) -> None:
    plain = nn.Linear(num_inputs, 32, dtype=torch.bfloat16)
    assert quantize(plain) is plain
    table = Embedding(nn.Parameter(torch.randn(32, num_inputs, dtype=torch.bfloat16)))
    assert int8_embedding(table) is table
    assert not can_keep(32, num_inputs, 8, None)


def test_a_model_of_such_sizes_is_quantized_where_it_can_be(model_folders: ModelFolders) -> None:
    """The queries' latents have 24 numbers."""
    folder = str(model_folders("youtu"))
    with LLM(folder, multiprocess=False, device="cpu", max_model_len=96, quantization="int8") as llm:
        (output,) = llm.generate([random_tokens(20, seed=1)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
