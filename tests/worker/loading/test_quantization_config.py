"""``quantization_config``: published ones are read, all else is refused before weights are read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.worker.loading.formats.weight_format import read_weight_format
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.loading.conftest import SIZES, Folders
from tests.worker.loading.quantized_folders import (
    WRITERS,
    edit_config,
    write_quantized,
)


def config_of(name: str) -> dict[str, Any]:
    """A fresh copy of a format's config."""
    copy: dict[str, Any] = json.loads(json.dumps(WRITERS[name].config))
    return copy


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("awq", "quant_method", "bitsandbytes"),
        ("awq", "bits", 3),
        ("awq", "version", "gemv"),
        ("awq", "zero_point", False),
        ("awq", "group_size", 100),
        ("awq", "unheard_of", 1),
        ("gptq", "checkpoint_format", "marlin"),
        ("gptq", "bits", 3),
        ("gptq", "dynamic", {"+:.*down.*": {"bits": 8}}),
        ("fp8-blocks", "fmt", "e5m2"),
        ("fp8-blocks", "expert_dtype", "fp4"),
        ("fp8-blocks", "weight_block_size", [128]),
        ("compressed-int4", "format", "nvfp4-pack-quantized"),
        ("compressed-int4", "transform_config", {"config_groups": {"R1": {}}}),
        ("compressed-int4", "config_groups", {}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    """The error has the field, its value and what is supported, before weights are read: there are none."""
    folder = make_model_folder(tmp_path, "llama", weights=False)
    edit_config(folder, quantization_config=config_of(name) | {field: value})
    with pytest.raises(ModelLoadError, match=rf"^quantization_config\.{field}.*\.$"):
        load_model(ModelConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bits", 3), ("type", "float"), ("strategy", "tensor_group"), ("dynamic", True), ("odd", 1)],
)
def test_what_a_group_says_of_its_weights_is_read_too(field: str, value: object) -> None:
    config = config_of("compressed-int4")
    config["config_groups"]["group_0"]["weights"][field] = value
    with pytest.raises(
        ModelLoadError, match=rf"quantization_config.config_groups.group_0.weights.{field} is"
    ):
        read_weight_format({"quantization_config": config})


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B-FP8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "modules_to_not_convert": ["lm_head"],
        "weight_block_size": [128, 128],
    },
    "DeepSeek-V3.1": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "AutoFP8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "gpt-oss": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "AutoAWQ": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "AWQ of GPTQModel": {
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": False,
        "lm_head": False,
        "meta": {},
        "quant_method": "awq",
        "checkpoint_format": "gemm",
        "pack_dtype": "int32",
        "version": "gemm",
        "zero_point": True,
    },
    "GPTQ of optimum": {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
        "model_seqlen": None,
        "pad_token_id": None,
        "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": None,
        "quant_method": "gptq",
        "sym": True,
        "tokenizer": None,
        "true_sequential": True,
        "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "GPTQModel": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": True,
        "dynamic": None,
        "group_size": 128,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:2.0"]},
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    },
    "llm-compressor, w4a16": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": "weight",
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 128,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.8,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "quantization_status": "compressed",
        "transform_config": {},
        "version": "0.12.2",
    },
}
"""Configs of publishers."""


@pytest.mark.parametrize("publisher", PUBLISHED)
def test_what_is_published_is_read(publisher: str) -> None:
    assert read_weight_format({"quantization_config": PUBLISHED[publisher]}) is not None


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.text(max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(data=st.data(), publisher=st.sampled_from(sorted(PUBLISHED)))
def test_whatever_a_field_holds_is_read_or_refused(data: st.DataObject, publisher: str) -> None:
    """A wrong value at any depth is refused in a sentence."""
    config = json.loads(json.dumps(PUBLISHED[publisher]))
    inner = config
    while True:
        field = data.draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[field], dict) or not inner[field] or data.draw(st.booleans()):
            break
        inner = inner[field]
    inner[field] = data.draw(ODD)
    with contextlib.suppress(ModelLoadError):
        read_weight_format({"quantization_config": config})


def test_rules_that_only_leave_modules_out_are_followed() -> None:
    assert read_weight_format({"quantization_config": config_of("gptq") | {"dynamic": {"-:.*gate$": {}}}})


@pytest.mark.parametrize(
    ("name", "victim", "sentence"),
    [
        ("awq", "qzeros", "q_proj.qzeros, which .*q_proj.qweight in .* needs, is missing"),
        ("gptq", "scales", "q_proj.scales, which .*q_proj.qweight in .* needs, is missing"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            "q_proj.weight in .* as F8_E4M3, which is not supported",
        ),
        ("compressed-int4", "weight_scale", "q_proj.weight_scale, which .*weight_packed in .* needs"),
    ],
)
def test_a_weight_without_one_of_its_tensors_is_named(
    name: str, victim: str, sentence: str, quantized: Folders, tmp_path: Path
) -> None:
    folder = tmp_path
    for file in quantized(name).path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.self_attn.q_proj.{victim}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=sentence):
        load_model(ModelConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        *(("awq", "qweight"), ("gptq", "qweight"), ("compressed-int4", "weight_packed")),
        *(("fp8-blocks", "weight_scale_inv"), ("compressed-int4", "weight_scale")),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    name: str, victim: str, quantized: Folders, tmp_path: Path
) -> None:
    for file in quantized(name).path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    full_name = f"model.layers.0.self_attn.q_proj.{victim}"
    for shape in ((4,), (3, 5), (2, 2, 2)):
        odd = torch.zeros(shape, dtype=tensors[full_name].dtype)
        save_file(tensors | {full_name: odd}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=r"q_proj.* has shape"):
            load_model(ModelConfig(model=str(tmp_path), device="cpu"))


def test_a_bias_of_zeros_that_a_writer_added_is_no_error(tmp_path: Path) -> None:
    """Any other bias is refused: without it, tokens would silently be wrong."""
    source = make_model_folder(tmp_path / "source", "llama", **SIZES)  # type: ignore[arg-type]
    folder = write_quantized(source, tmp_path / "gptq", WRITERS["gptq"])
    file = folder.path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.bias"
    tensors = load_file(file)
    save_file(tensors | {name: torch.zeros(384)}, file)
    assert load_model(ModelConfig(model=str(folder.path), device="cpu")).model is not None
    save_file(tensors | {name: torch.ones(384)}, file)
    with pytest.raises(ModelLoadError, match=f"holds tensor {name}, which LlamaForCausalLM does not use"):
        load_model(ModelConfig(model=str(folder.path), device="cpu"))


def test_a_group_size_that_the_tensors_deny_is_refused(quantized: Folders, tmp_path: Path) -> None:
    folder = tmp_path
    for file in quantized("awq").path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edit_config(folder, quantization_config=config_of("awq") | {"group_size": 32})
    with pytest.raises(ModelLoadError, match=r"qzeros in .* has shape \[6, 16\], .* needs \[12, 16\]"):
        load_model(ModelConfig(model=str(folder), device="cpu"))
