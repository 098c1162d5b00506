"""Weights that stay in the bits of their checkpoint, because a kernel of the CPU reads them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config.engine_config import ModelConfig
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_weights import PackedWeightLinear, Weight4, Weight8
from engine.worker.cpu.quantized_linear import Int4Linear, Int8Linear
from engine.worker.loading.loader import load_model
from engine.worker.loading.model_folder import read_config
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from tests.worker.cpu.test_onednn_linear import resident_bytes
from tests.worker.generation import Reference, random_tokens
from tests.worker.loading.conftest import SIZES, Folders, generated
from tests.worker.loading.quantized_folders import (
    KEPT,
    WRITERS,
    edit_config,
    write_quantized,
)

FOUR_LINEARS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")


@torch.inference_mode()
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("with_compiler", [True, False])
def test_what_a_kernel_reads_stays_in_its_bits(
    name: str, with_compiler: bool, quantized: Folders, request: pytest.FixtureRequest
) -> None:
    """The linears' weights equal those of the folder, except that scales and zeros are rounded to bf16."""
    if with_compiler:
        request.getfixturevalue("compiled")
    model, dequantized = (
        load_model(
            ModelConfig(
                model=str(path),
                device="cpu",
                dtype="bfloat16" if with_compiler else "float32",
                attention_backend="auto" if with_compiler else "torch",
            )
        ).model
        for path in (quantized(name).path, quantized(name).dequantized)
    )
    assert isinstance(model, Decoder)
    assert isinstance(dequantized, Decoder)
    for layer, plain_layer in zip(model.layers, dequantized.layers, strict=True):
        for linear in FOUR_LINEARS:
            module, plain = layer.get_submodule(linear), plain_layer.get_submodule(linear)
            if with_compiler:
                assert isinstance(module, PackedWeightLinear)
                assert isinstance(module._weight, Weight4 if KEPT[name] == 4 else Weight8)
            else:
                assert isinstance(module, Int4Linear if KEPT[name] == 4 else Int8Linear)
            num_inputs = 384 if linear == "mlp.down" else 128
            ones = torch.eye(num_inputs, dtype=torch.bfloat16 if with_compiler else torch.float32)
            kept, wanted = module(ones).float(), plain(ones).float()
            step = 2**-8 if with_compiler else 2**-20
            assert float((kept - wanted).abs().max()) < 2 * step * float(wanted.abs().max())


def test_kept_weights_take_the_memory_of_their_bits(tmp_path: Path, compiled: CompiledGemm) -> None:
    """Kept weights take less than half of their memory in 16 bits, also while they are loaded."""
    folder = make_model_folder(
        tmp_path, "qwen3", weights=False, hidden_size=1024, intermediate_size=3072, num_layers=8, tie=True
    )
    edit_config(folder, quantization_config=WRITERS["awq-128"].config, dtype="float16")
    plain = Decoder(read_config(folder, trust_remote_code=False), torch.float16).checkpoint_parts()
    tensors = {}
    num_bytes = 0
    for name, part in plain.items():
        if ".layers." not in name or part.view.dim() == 1:
            tensors[name] = torch.ones(part.view.shape, dtype=torch.float16)
            continue
        num_outputs, num_inputs = part.view.shape
        prefix = name.removesuffix("weight")
        tensors[prefix + "qweight"] = torch.zeros(num_inputs, num_outputs // 8, dtype=torch.int32)
        tensors[prefix + "qzeros"] = torch.zeros(num_inputs // 128, num_outputs // 8, dtype=torch.int32)
        tensors[prefix + "scales"] = torch.ones(num_inputs // 128, num_outputs, dtype=torch.float16)
        num_bytes += 2 * part.view.numel()
    save_file(tensors, folder / "model.safetensors")
    before = resident_bytes()
    loaded = load_model(ModelConfig(model=str(folder), device="cpu"))
    assert resident_bytes() - before < 0.45 * num_bytes
    assert isinstance(loaded.model, Decoder)


def test_what_happens_to_the_weights_is_logged(quantized: Folders, caplog: pytest.LogCaptureFixture) -> None:
    """The log says what is dequantized and why, and what stays quantized."""
    with caplog.at_level(logging.INFO):
        load_model(ModelConfig(model=str(quantized("fp8-blocks").path), device="cpu"))
        load_model(ModelConfig(model=str(quantized("awq").path), device="cpu"))
    text = caplog.text
    assert "FP8 weights are dequantized to float32: no kernel here reads them; " in text
    assert "AWQ int4 weights stay quantized: " in text


def test_a_quantized_head_is_dequantized_or_kept(tmp_path: Path) -> None:
    """GPTQ can also write the head."""
    source = make_model_folder(tmp_path / "source", "qwen3", **SIZES)  # type: ignore[arg-type]
    folder = write_quantized(source, tmp_path / "head", WRITERS["gptq"], head=True)
    prompt = random_tokens(30, seed=5)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)
