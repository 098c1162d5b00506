"""Weights rounded to 8 and 4 bits: what the format says, and a whole model as transformers computes it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.loader import load_model
from engine.worker.models.decoder import Decoder
from engine.worker.models.linears import Table
from engine.worker.models.quantized_linear import (
    GROUP_SIZE,
    Int4Linear,
    Int8Linear,
    Int8Table,
    int4_linear,
    int8_linear,
)
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.test_packed_linear import resident_bytes

WITHIN = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
"""How far a product may be from that in 64 bits: relative, absolute."""
DTYPES = tuple(WITHIN)


def rounded(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """``weight`` as it is kept, by what is said of the format."""
    groups = weight.float().view(len(weight), -1, group_size)
    if bits == 8:
        scales = (groups.abs().amax(-1, keepdim=True) / 127).to(weight.dtype).float()
        return (scales.double() * (groups / scales).round().clamp(-127, 127)).flatten(1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low) / 15
    zeros = (low + 8 * scales).to(weight.dtype).float()
    scales = scales.to(weight.dtype).float()
    return (zeros.double() + scales.double() * ((groups - zeros) / scales).round().clamp(-8, 7)).flatten(1)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    relative, absolute = WITHIN[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=absolute)


def made(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(num_outputs)
    return nn.Linear(num_inputs, num_outputs, dtype=dtype).requires_grad_(False)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 8, 33, 300])
def test_a_product_is_that_of_the_rounded_weight(num_rows: int, dtype: torch.dtype) -> None:
    """For any number of rows, with and without a bias, whatever the sizes."""
    for num_outputs, num_inputs in ((64, 256), (1003, 96)):
        plain = made(num_outputs, num_inputs, dtype)
        x = torch.randn(num_rows, num_inputs).to(dtype)
        eight, four = Int8Linear(plain.weight, plain.bias), int4_linear(plain)
        assert isinstance(four, Int4Linear if num_outputs == 64 else Int8Linear)
        expected: dict[nn.Module, torch.Tensor] = {eight: rounded(plain.weight, 8, num_inputs)}
        if isinstance(four, Int4Linear):
            expected[four] = rounded(plain.weight, 4, GROUP_SIZE)
        for linear, weight in expected.items():
            product = x.double() @ weight.T
            assert_near(linear(x), product + plain.bias.double(), dtype)
        without_bias = Int8Linear(plain.weight, None)(x)
        assert_near(without_bias, x.double() @ expected[eight].T, dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_finds_what_it_multiplies_with(dtype: torch.dtype) -> None:
    """Each vector is the rounded one, looked up and multiplied alike, though they were rounded in parts."""
    weight = made(5000, 48, dtype).weight
    table = Int8Table(Table(nn.Parameter(weight, requires_grad=False)))
    vectors = rounded(weight, 8, 48)
    ids = torch.arange(5000).flip(0)
    assert_near(table(ids), vectors[ids], dtype)
    x = torch.randn(5, 48).to(dtype)
    assert_near(table.products(x), x.double() @ vectors.T, dtype)


@torch.inference_mode()
def test_nothing_but_zeros_stays_nothing() -> None:
    plain = nn.Linear(64, 32, bias=False)
    nn.init.zeros_(plain.weight)
    for linear in (int8_linear(plain), int4_linear(plain)):
        assert torch.equal(linear(torch.ones(2, 64)), torch.zeros(2, 32))


@pytest.mark.parametrize(
    ("quantization", "name"), [("int8", "qwen3"), ("int8", "qwen2"), ("int4", "llama-yarn-tied")]
)
def test_the_tokens_are_those_of_transformers(
    quantization: str, name: str, model_folders: ModelFolders
) -> None:
    """With the same rounded weights, tied or not, with biases or without."""
    reference = Reference(model_folders(name))
    _round_weights(reference.model, quantization)
    prompt = random_tokens(30, seed=3)
    with LLM(str(model_folders(name)), multiprocess=False, quantization=quantization) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == reference.greedy(prompt, 24)


def _round_weights(model: nn.Module, quantization: str) -> None:
    """In place: the head to 8 bits, all else as told."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            weight = module.weight
            fits = not (weight.shape[1] % GROUP_SIZE or weight.shape[0] % 16)
            if quantization == "int4" and name != "lm_head":
                assert fits, "this model is not one of 4 bits"
                weight.copy_(rounded(weight, 4, GROUP_SIZE))
            else:
                weight.copy_(rounded(weight, 8, weight.shape[1]))


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.6), ("int4", 0.5)])
def test_rounded_weights_take_less_memory(quantization: str, share: float, tmp_path: Path) -> None:
    """Of what the weights would take in 16 bits; the head and the embedding stay at 8."""
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
    """Their pages come in the background, and count as this process's."""
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()


def test_what_cannot_be_rounded_is_said(model_folders: ModelFolders) -> None:
    """One sentence that names the field: for a kind there is not, and for a model that is not ours."""
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, got 'int3'"):
        LLM(str(model_folders("llama")), quantization="int3")
    with pytest.raises(ConfigError, match="quantization: int8 is made for models with a native"):
        LLM(str(model_folders("phi")), quantization="int8", multiprocess=False)
