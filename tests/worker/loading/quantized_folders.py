"""Writes model folders in the published formats of quantized checkpoints, number by number, and with each the
plain folder of the same weights. Shares no code with the engine's readers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Floats = NDArray[np.float32]
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, Floats]
"""The tensors that replace ``weight``, by the end of their names, and the weight that they mean."""


@dataclass(frozen=True)
class Writer:
    """A format: its description in config.json, and how it writes a weight [outputs, inputs]."""

    config: dict[str, Any]
    write: Callable[[Floats, np.random.Generator], Written]
    stacked: bool = False
    """Whether it is only for stacked experts."""


@dataclass(frozen=True)
class QuantizedFolder:
    """A model in a format, and the same model in plain weights."""

    path: Path
    dequantized: Path
    names: tuple[str, ...]
    """Names of the quantized weights."""


def write_quantized(source: Path, target: Path, writer: Writer, *, head: bool = False) -> QuantizedFolder:
    """Writes the weights of all layers of a one-file folder in a format, except routers; ``head``: and its
    head."""
    random = np.random.default_rng(0)
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    names = [
        name
        for name, tensor in tensors.items()
        if (".layers." in name and _is_for(writer, name, tensor)) or (head and name == "lm_head.weight")
    ]
    for name in names:
        parts, dequantized = writer.write(stored.pop(name).float().numpy(), random)
        stored |= {name.removesuffix("weight") + ending: part for ending, part in parts.items()}
        plain[name] = torch.from_numpy(dequantized).to(tensors[name].dtype)
    for folder, held in ((target / "quantized", stored), (target / "dequantized", plain)):
        shutil.copytree(source, folder)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    edit_config(target / "quantized", quantization_config=writer.config)
    return QuantizedFolder(target / "quantized", target / "dequantized", tuple(names))


def _is_for(writer: Writer, name: str, tensor: torch.Tensor) -> bool:
    if writer.stacked:
        return tensor.dim() == 3
    return tensor.dim() == 2 and name.endswith(".weight") and not name.endswith("mlp.gate.weight")


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def e4m3_values() -> Floats:
    """The value of each byte in float8_e4m3fn: sign, 4 bits of exponent biased by 7, 3 of fraction; no
    infinities, NaN in 0x7f and 0xff."""
    values = []
    for byte in range(256):
        exponent, fraction = byte >> 3 & 15, byte & 7
        size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        size = float("nan") if byte & 127 == 127 else size
        values.append(-size if byte & 128 else size)
    return np.array(values, np.float32)


def to_e4m3(numbers: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """The bytes with the nearest values, and these values."""
    values = e4m3_values()
    order = np.argsort(np.where(np.isnan(values), np.inf, values))[:254]
    levels = values[order]
    at = np.clip(np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers), 0, 253)
    octets = order[at].astype(np.uint8)
    return octets, values[octets]


def as_fp8(octets: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(octets).view(torch.float8_e4m3fn)


def blocked(grid: Floats, shape: tuple[int, ...], block: tuple[int, int]) -> Floats:
    """Repeats a number per block for each weight; the last blocks are cut off."""
    result = np.empty(shape, np.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            result[row, column] = grid[row // block[0], column // block[1]]
    return result


def scales_of(weight: Floats, block: tuple[int, int], largest: float) -> Floats:
    """The scale of each block that makes its largest number the format's largest."""
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    scales = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scales[row, column] = np.abs(part).max() / largest
    return scales


def fp8(block: tuple[int, int] | None, scale_name: str = "weight_scale_inv") -> Writer:
    """FP8 with a scale per block, or one for the tensor."""

    def write(weight: Floats, _: np.random.Generator) -> Written:
        used = block or (weight.shape[0], weight.shape[1])
        scales = scales_of(weight, used, 448)
        wide = blocked(scales, weight.shape, used)
        octets, values = to_e4m3(weight / wide)
        kept = torch.from_numpy(scales if block else scales.reshape(()))
        return {"weight": as_fp8(octets), scale_name: kept}, values * wide

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Writer(config | ({"weight_block_size": list(block)} if block else {}), write)


def compressed(layout: str, **weights: object) -> dict[str, Any]:
    """compressed-tensors' config for one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def compressed_fp8() -> Writer:
    """A scale per output, in bf16; activations dynamic, which the weights alone do not need."""

    def write(weight: Floats, _: np.random.Generator) -> Written:
        block = (1, weight.shape[1])
        scales = torch.from_numpy(scales_of(weight, block, 448)).bfloat16()
        wide = blocked(scales.float().numpy(), weight.shape, block)
        octets, values = to_e4m3(weight / wide)
        return {"weight": as_fp8(octets), "weight_scale": scales}, values * wide

    config = compressed(
        "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel", dynamic=False
    )
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8,
        "type": "float",
        "dynamic": True,
    }
    return Writer(config, write)


def compressed_int8(*, symmetric: bool) -> Writer:
    def write(weight: Floats, random: np.random.Generator) -> Written:
        block = (1, weight.shape[1])
        scales = scales_of(weight, block, 100)
        zeros = np.zeros(scales.shape, np.int8)
        if not symmetric:
            zeros = random.integers(-27, 27, scales.shape).astype(np.int8)
        wide, wide_zeros = (blocked(grid, weight.shape, block) for grid in (scales, zeros.astype(np.float32)))
        numbers = np.clip(np.round(weight / wide + wide_zeros), -128, 127)
        parts = {
            "weight": torch.from_numpy(numbers.astype(np.int8)),
            "weight_scale": torch.from_numpy(scales),
        }
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(zeros)
        return parts, (numbers - wide_zeros) * wide

    return Writer(
        compressed("int-quantized", num_bits=8, type="int", symmetric=symmetric, strategy="channel"), write
    )


@dataclass(frozen=True)
class _Grid:
    """A weight in unsigned integers with a scale and a zero for each output and group of inputs."""

    numbers: NDArray[np.int64]
    scales: NDArray[np.float16]
    zeros: NDArray[np.int64]
    groups: NDArray[np.int64]
    """The group of each input."""

    @property
    def dequantized(self) -> Floats:
        zeros, scales = self.zeros[:, self.groups], self.scales.astype(np.float32)[:, self.groups]
        result: Floats = (self.numbers - zeros).astype(np.float32) * scales
        return result


def quantized_to_grid(
    weight: Floats, bits: int, group_size: int, *, symmetric: bool, order: NDArray[np.int64] | None = None
) -> _Grid:
    """``order``: the inputs' sort keys before they are grouped; None: as they come."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = np.arange(weight.shape[1]) // size
    if order is not None:
        groups = groups[order]
    levels = (1 << bits) - 1
    shape = (len(weight), groups.max() + 1)
    scales, zeros = np.empty(shape, np.float16), np.empty(shape, np.int64)
    for group in range(shape[1]):
        low = weight[:, groups == group].min(axis=1)
        high = weight[:, groups == group].max(axis=1)
        if symmetric:
            scales[:, group] = 2 * np.maximum(high, -low) / levels
            zeros[:, group] = (levels + 1) // 2
        else:
            scales[:, group] = (high - low) / levels
            zeros[:, group] = np.clip(np.round(-low / scales[:, group].astype(np.float32)), 1, levels)
    wide = scales.astype(np.float32)[:, groups]
    numbers = np.clip(np.round(weight / wide).astype(np.int64) + zeros[:, groups], 0, levels)
    return _Grid(numbers, scales, zeros, groups)


def packed(numbers: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] -> [n, words], m in words of 32 bits, the first of ``order`` in the lowest bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    missing = -numbers.shape[1] % per_word
    numbers = np.pad(numbers, ((0, 0), (0, missing)))
    words = np.zeros((len(numbers), numbers.shape[1] // per_word), np.uint32)
    for word in range(words.shape[1]):
        for place, number in enumerate(order):
            words[:, word] |= numbers[:, word * per_word + number].astype(np.uint32) << np.uint32(
                bits * place
            )
    return torch.from_numpy(words.view(np.int32))


def awq(group_size: int) -> Writer:
    """The gemm layout: eight outputs a word, interleaved."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(weight: Floats, _: np.random.Generator) -> Written:
        grid = quantized_to_grid(weight, 4, group_size, symmetric=False)
        parts = {
            "qweight": packed(grid.numbers.T, 4, order),
            "qzeros": packed(grid.zeros.T, 4, order),
            "scales": torch.from_numpy(grid.scales.T.copy()),
        }
        return parts, grid.dequantized

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "GEMM",
        "modules_to_not_convert": None,
    }
    return Writer(config, write)


def gptq(
    group_size: int, *, bits: int = 4, symmetric: bool = True, act_order: bool = False, version: int = 1
) -> Writer:
    """Consecutive inputs in a word; version 1 stores zeros minus one."""

    def write(weight: Floats, random: np.random.Generator) -> Written:
        order = random.permutation(weight.shape[1]) if act_order else None
        grid = quantized_to_grid(weight, bits, group_size, symmetric=symmetric, order=order)
        parts = {
            "qweight": packed(grid.numbers, bits).T,
            "qzeros": packed(grid.zeros.T - (1 if version == 1 else 0), bits),
            "scales": torch.from_numpy(grid.scales.T.copy()),
            "g_idx": torch.from_numpy(grid.groups.astype(np.int32)),
        }
        return parts, grid.dequantized

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": symmetric,
        "lm_head": False,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Writer(config, write)


def pack_quantized(
    group_size: int, *, bits: int = 4, symmetric: bool = True, act_order: bool = False
) -> Writer:
    """compressed-tensors' w4a16: consecutive inputs in a word, zeros packed by outputs."""

    def write(weight: Floats, random: np.random.Generator) -> Written:
        order = random.permutation(weight.shape[1]) if act_order else None
        grid = quantized_to_grid(weight, bits, group_size, symmetric=symmetric, order=order)
        parts = {
            "weight_packed": packed(grid.numbers, bits),
            "weight_scale": torch.from_numpy(grid.scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = packed(grid.zeros.T, bits).T
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(grid.groups.astype(np.int32))
        return parts, grid.dequantized

    strategy = "channel" if group_size == -1 else "group"
    config = compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=None if group_size == -1 else group_size,
        actorder="group" if act_order else None,
        observer="minmax",
    )
    return Writer(config, write)


def mxfp4() -> Writer:
    """gpt-oss's experts [experts, inputs, outputs]: e2m1 numbers, two in a byte, the first in its low half,
    and for 32 inputs a power of two, biased by 127."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

    def write(weight: Floats, _: np.random.Generator) -> Written:
        rows = weight.transpose(0, 2, 1)
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        powers = np.floor(np.log2(np.abs(blocks).max(axis=-1) / 6)) + 1
        sizes = np.abs(blocks) / 2.0 ** powers[..., None]
        nearest = np.abs(sizes[..., None] - levels).argmin(axis=-1)
        codes = (nearest + 8 * (blocks < 0)).astype(np.uint8)
        values = np.where(blocks < 0, -levels[nearest], levels[nearest]) * 2.0 ** powers[..., None]
        parts = {
            "_blocks": torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4),
            "_scales": torch.from_numpy((powers + 127).astype(np.uint8)),
        }
        return parts, values.reshape(rows.shape).transpose(0, 2, 1).astype(np.float32)

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return Writer(config, write, stacked=True)


WRITERS = {
    "fp8-blocks": fp8((48, 80)),
    "fp8-tensor": fp8(None, "weight_scale"),
    "compressed-fp8": compressed_fp8(),
    "compressed-int8": compressed_int8(symmetric=True),
    "compressed-int8-zeros": compressed_int8(symmetric=False),
    "compressed-int4": pack_quantized(32),
    "compressed-int4-zeros": pack_quantized(64, symmetric=False),
    "compressed-int4-order": pack_quantized(64, act_order=True),
    "compressed-int8-packed": pack_quantized(-1, bits=8),
    "awq": awq(64),
    "awq-128": awq(128),
    "gptq": gptq(128),
    "gptq-zeros": gptq(32, symmetric=False),
    "gptq-order": gptq(64, symmetric=False, act_order=True),
    "gptq-v2": gptq(-1, symmetric=False, version=2),
    "gptq-8": gptq(64, bits=8),
}
KEPT = {
    "compressed-int8": 8,
    "compressed-int4": 4,
    "compressed-int4-zeros": 4,
    "compressed-int8-packed": 8,
    "awq": 4,
    "awq-128": 4,
    "gptq": 4,
    "gptq-zeros": 4,
    "gptq-v2": 4,
}
"""The formats that kernels of the CPU read, and the bits in which they keep them."""
