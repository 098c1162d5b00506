"""This engine reads quantized checkpoints as the libraries that write them do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.weight_format import read_weight_format
from engine.worker.loading.tensor_part import TensorPart
from tests.worker.loading.quantized_folders import awq, fp8


def read_weight(folder: Path, config: dict[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """The folder's one weight, ``layer.weight``, in bf16."""
    checkpoint = Checkpoint(folder, weight_format=read_weight_format({"quantization_config": config}))
    found = torch.empty(shape, dtype=torch.bfloat16)
    checkpoint.fill({"layer.weight": TensorPart(found)})
    return found


INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32}),
        ("pack-quantized", INT4 | {"symmetric": False, "strategy": "group", "group_size": 64}),
        ("pack-quantized", INT4 | {"strategy": "channel"}),
        ("pack-quantized", INT8 | {"strategy": "group", "group_size": 128}),
        ("pack-quantized", INT8 | {"strategy": "channel"}),
        ("int-quantized", INT8 | {"strategy": "channel"}),
        ("int-quantized", INT8 | {"symmetric": False, "strategy": "channel"}),
        ("int-quantized", INT8 | {"strategy": "tensor"}),
        ("float-quantized", FP8 | {"strategy": "channel"}),
        ("float-quantized", FP8 | {"strategy": "tensor"}),
        ("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}),
    ],
)
def test_what_compressed_tensors_writes(layout: str, weights: dict[str, Any], tmp_path: Path) -> None:
    """Weights that the library compressed are read as it decompresses them, with partial blocks, too."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(layout)
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    stored = compressor.compress({"weight": weight, **_grid(weight, weights)}, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    save_file(
        {f"layer.{name}": tensor.contiguous() for name, tensor in stored.items()},
        tmp_path / "model.safetensors",
    )
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    found = read_weight(tmp_path, config, (200, 256))
    assert torch.equal(found, expected.to(torch.bfloat16))


def _grid(weight: torch.Tensor, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Scales and zeros as from a calibration."""
    rows, columns = weight.shape
    blocks: dict[str, tuple[int, int]] = {
        "group": (1, weights.get("group_size", 0)),
        "channel": (1, columns),
        "tensor": (rows, columns),
        "block": (128, 128),
    }
    block = blocks[weights["strategy"]]
    parts = [torch.split(part, block[1], dim=1) for part in torch.split(weight, block[0])]
    largest = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 1
    scales = torch.stack([torch.stack([part.abs().max() / largest for part in row]) for row in parts])
    if weights["strategy"] == "tensor":
        scales = scales.reshape(1)
    grid = {"weight_scale": scales}
    if not weights["symmetric"]:
        generator = torch.Generator().manual_seed(2)
        grid["weight_zero_point"] = torch.randint(-4, 4, scales.shape, generator=generator).to(torch.int8)
    return grid


def test_awq_is_what_compressed_tensors_converts_it_to(tmp_path: Path) -> None:
    """The library's converter unpacks AutoAWQ's words independently of our code."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    writer = awq(64)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    parts, _ = writer.write(weight.numpy(), np.random.default_rng(0))
    tensors = {f"layer.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    theirs = AutoAWQConverter(group_size=64).process(dict(tensors))
    numbers = unpack_from_int32(theirs["layer.weight_packed"], 4, torch.Size((96, 256)))
    zeros = unpack_from_int32(theirs["layer.weight_zero_point"], 4, torch.Size((96, 4)), packed_dim=0)
    scales = theirs["layer.weight_scale"].float()
    expected = (numbers.float() - zeros.float().repeat_interleave(64, 1)) * scales.repeat_interleave(64, 1)
    assert torch.equal(read_weight(tmp_path, writer.config, (96, 256)), expected.bfloat16())


@pytest.mark.parametrize("block", [(32, 64), (96, 128)])
def test_fp8_is_what_transformers_dequantizes_it_to(block: tuple[int, int], tmp_path: Path) -> None:
    writer = fp8(block)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    parts, _ = writer.write(weight.numpy(), np.random.default_rng(0))
    save_file({f"layer.{name}": tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors")
    operation = Fp8Dequantize(None)  # type: ignore[no-untyped-call]
    theirs = operation._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.bfloat16)
    assert torch.equal(read_weight(tmp_path, writer.config, (96, 256)), theirs)
