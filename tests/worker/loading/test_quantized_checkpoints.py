"""Checkpoints in fewer bits: each published format gives the tokens of the weights that it means,
dequantized or kept in its bits, on one rank and on two; what is not known is refused before weights are
read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config import ModelConfig
from engine.errors import ModelLoadError
from engine.frontend.llm import LLM
from engine.sampling_params import SamplingParams
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_experts import PackedExperts
from engine.worker.cpu.packed_weights import PackedWeightLinear, Weight4, Weight8
from engine.worker.cpu.quantized_linear import Int4Linear, Int8Linear
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.stored_tensor import TensorEntry, TensorFiles
from engine.worker.loading.formats.weight_format import read_weight_format
from engine.worker.loading.loader import load_model
from engine.worker.loading.model_folder import read_config, read_format
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.models.transformers_model import TransformersModel
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.api.server import running_server
from tests.worker.cpu.test_onednn_linear import resident_bytes
from tests.worker.generation import Reference, random_tokens
from tests.worker.loading.quantized_folders import (
    KEPT,
    WRITERS,
    QuantizedFolder,
    edit_config,
    mxfp4,
    write_quantized,
)
from tests.worker.parallel.ranks import LoneRank, two_ranks

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2}
FOUR_LINEARS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")

Folders = Callable[[str], QuantizedFolder]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A native model in a format, made once."""
    return _folders(tmp_path_factory, "qwen2")


@pytest.fixture(scope="module")
def other_family(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model that runs through transformers."""
    return _folders(tmp_path_factory, "olmo2")


def _folders(tmp_path_factory: pytest.TempPathFactory, family: str) -> Folders:
    base = tmp_path_factory.mktemp(family)
    source = make_model_folder(base / "source", family, **SIZES)  # type: ignore[arg-type]
    made: dict[str, QuantizedFolder] = {}

    def folder_of(name: str) -> QuantizedFolder:
        if name not in made:
            made[name] = write_quantized(source, base / name, WRITERS[name])
        return made[name]

    return folder_of


def generated(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    with LLM(str(folder), multiprocess=False, **options) as llm:
        (output,) = llm.generate([prompt], GREEDY)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", WRITERS)
def test_the_tokens_are_those_of_the_dequantized_weights(name: str, quantized: Folders) -> None:
    """As transformers computes them from a plain folder of the same weights."""
    folder = quantized(name)
    prompt = random_tokens(30, seed=4)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_of_transformers_is_dequantized(name: str, other_family: Folders) -> None:
    """Without the library that wrote it."""
    folder = other_family(name)
    options = ModelConfig(model=str(folder.path), device="cpu")
    model = load_model(options).model
    assert isinstance(model, TransformersModel)
    expected = load_file(folder.dequantized / "model.safetensors")
    assert model._model is not None
    found = model._model.state_dict()
    for tensor_name in folder.names:
        assert torch.equal(found[tensor_name], expected[tensor_name])
    if name == "awq":
        prompt = random_tokens(30, seed=4)
        assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@torch.inference_mode()
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("with_compiler", [True, False])
def test_what_a_kernel_reads_stays_in_its_bits(
    name: str, with_compiler: bool, quantized: Folders, request: pytest.FixtureRequest
) -> None:
    """The linears' weights are those of the folder but for a rounding to bf16 of scales and zeros."""
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


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "compressed-int8-zeros", "gptq-order", "compressed-int4-order"]
)
def test_the_parts_of_two_ranks_are_the_dequantized_weights(name: str, quantized: Folders) -> None:
    """Put side by side; blocks and groups may be cut in two."""
    folder = quantized(name)
    whole = load_file(folder.dequantized / "model.safetensors")
    ranks = [rank_of(folder.path, rank).checkpoint_parts() for rank in range(2)]
    for tensor_name, tensor in whole.items():
        first, second = (parts[tensor_name] for parts in ranks)
        both = first.view if first.count == 1 else torch.cat((first.view, second.view), first.dim)
        assert torch.equal(both, tensor)


def rank_of(folder: Path, rank: int) -> Decoder:
    model = load_model(ModelConfig(model=str(folder), device="cpu"), LoneRank(rank, 2)).model
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name", ["fp8-blocks", "awq-128", "compressed-int8"])
def test_two_ranks_give_the_same_tokens(name: str, quantized: Folders) -> None:
    """Dequantized, in int4 whose groups the ranks cut, and in int8."""
    folder = quantized(name)
    prompt = random_tokens(40, seed=7)
    with two_ranks(folder.path) as engine:
        engine.add("one", prompt, GREEDY)
        engine.run()
        tokens = list(engine.requests["one"].output_token_ids)
    assert tokens == Reference(folder.dequantized).greedy(prompt, 16)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq"])
def test_a_rank_reads_its_share_of_the_bytes(
    name: str, quantized: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks about half, scales and zeros included."""
    read: list[int] = []

    def counting(files: TensorFiles, entry: TensorEntry, *region: slice) -> torch.Tensor:
        tensor = plainly(files, entry, *region)
        read.append(tensor.nbytes if entry.name.split(".")[-1] != "g_idx" else 0)
        return tensor

    plainly = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", counting)
    rank_of(quantized(name).path, 1)
    size = (quantized(name).path / "model.safetensors").stat().st_size
    assert sum(read) == pytest.approx(size / 2, rel=0.1)


def test_a_quantized_head_is_dequantized_or_kept(tmp_path: Path) -> None:
    """GPTQ can write the head too."""
    source = make_model_folder(tmp_path / "source", "qwen3", **SIZES)  # type: ignore[arg-type]
    folder = write_quantized(source, tmp_path / "head", WRITERS["gptq"], head=True)
    prompt = random_tokens(30, seed=5)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@pytest.mark.parametrize("name", WRITERS)
def test_weights_are_dequantized_where_they_lie(name: str, quantized: Folders) -> None:
    """On another device all that is computed is computed there; here on one without numbers."""
    folder = quantized(name)
    checkpoint = Checkpoint(folder.path, weight_format=read_format(folder.path))
    for tensor in folder.names[:7]:
        view = torch.empty(checkpoint.tensors[tensor].shape, device="meta")
        checkpoint.fill({tensor: TensorPart(view)})


def test_what_happens_to_the_weights_is_logged(quantized: Folders, caplog: pytest.LogCaptureFixture) -> None:
    """Before it happens: dequantized and why, or kept, and the memory."""
    with caplog.at_level(logging.INFO):
        load_model(ModelConfig(model=str(quantized("fp8-blocks").path), device="cpu"))
        load_model(ModelConfig(model=str(quantized("awq").path), device="cpu"))
    text = caplog.text
    assert "FP8 weights are dequantized to float32: no kernel here reads them; " in text
    assert "AWQ int4 weights stay in their bits: " in text


def test_a_float16_checkpoint_is_read_in_bfloat16(tmp_path: Path) -> None:
    """Unless a type is asked for: the CPU's kernels compute in it."""
    source = make_model_folder(tmp_path / "source", "llama", dtype="float16", **SIZES)  # type: ignore[arg-type]
    folder = write_quantized(source, tmp_path / "awq", WRITERS["awq"])
    assert load_model(ModelConfig(model=str(folder.path), device="cpu")).dtype == torch.bfloat16
    asked = load_model(ModelConfig(model=str(folder.path), device="cpu", dtype="float16"))
    assert asked.dtype == torch.float16
    assert load_model(ModelConfig(model=str(folder.dequantized), device="cpu")).dtype == torch.float16


def test_dequantized_weights_can_be_quantized_again(quantized: Folders) -> None:
    """``--quantization`` is for what does not stay as it is."""
    model = load_model(
        ModelConfig(
            model=str(quantized("fp8-blocks").path),
            device="cpu",
            dtype="float32",
            quantization="int8",
        )
    ).model
    assert isinstance(model, Decoder)
    assert isinstance(model.layers[0].get_submodule("mlp.down"), Int8Linear)


def test_kept_weights_take_the_memory_of_their_bits(tmp_path: Path, compiled: CompiledGemm) -> None:
    """Of what they would take in 16 bits, while and after they are loaded."""
    folder = make_model_folder(
        tmp_path, "qwen3", weights=False, hidden_size=1024, intermediate_size=3072, num_layers=8, tie=True
    )
    edit_config(folder, quantization_config=config_of("awq-128"), dtype="float16")
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


def test_answers_over_http_are_those_of_the_dequantized_weights(quantized: Folders) -> None:
    folder = quantized("awq")
    prompt = random_tokens(60, seed=6)
    flags = ("--device", "cpu", "--max-model-len", "256")
    with running_server(folder.path, *flags) as server:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    expected = Reference(folder.dequantized).greedy(prompt, 16)
    tokenizer = Tokenizer.load(ModelConfig(model=str(folder.path)))
    assert reply["choices"][0]["text"] == tokenizer.decode(expected)


def sparse_folder(path: Path, family: str, **fields: object) -> Path:
    """A mixture of experts as transformers saves it, which splits stacked experts where publishers do."""
    folder = make_model_folder(path, "qwen3", weights=False)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    given = sizes | heads | tokens | {"max_position_embeddings": 256} | fields
    config = AutoConfig.for_model(family, **given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def test_gpt_oss_in_mxfp4_gives_the_same_tokens(tmp_path: Path) -> None:
    source = sparse_folder(
        tmp_path / "source",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    folder = write_quantized(source, tmp_path / "mxfp4", mxfp4())
    assert len(folder.names) == 4
    prompt = random_tokens(40, seed=8)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-order", "compressed-int4"])
def test_experts_in_a_format_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Expert by expert, as Qwen3-MoE's are published."""
    source = sparse_folder(
        tmp_path / "source", "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    folder = write_quantized(source, tmp_path / name, WRITERS[name])
    assert sum(".experts." in tensor for tensor in folder.names) == 24
    prompt = random_tokens(40, seed=9)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["awq", "compressed-int4", "compressed-int8"])
def test_experts_stay_in_their_bits(name: str, tmp_path: Path, compiled: CompiledGemm) -> None:
    """And so do those of two ranks, but for a rounding of scales and zeros."""
    source = sparse_folder(
        tmp_path / "source",
        "qwen3_moe",
        hidden_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    )
    folder = write_quantized(source, tmp_path / name, WRITERS[name])
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0]]).repeat(3, 1)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))

    def experts_of(path: Path, group: TensorParallelGroup = ALONE) -> torch.Tensor:
        model = load_model(ModelConfig(model=str(path), device="cpu", dtype="bfloat16"), group).model
        assert isinstance(model, Decoder)
        experts = model.layers[1].get_submodule("mlp.experts")
        assert isinstance(experts, PackedExperts)
        expected = 16 if path == folder.dequantized else KEPT[name]
        assert experts.address().gate_up.bits == experts.address().down.bits == expected
        output: torch.Tensor = experts(x, chosen, weights)
        return output.float()

    wanted = experts_of(folder.dequantized)
    found = experts_of(folder.path)
    both = experts_of(folder.path, LoneRank(0, 2)) + experts_of(folder.path, LoneRank(1, 2))
    for output in (found, both):
        assert float((output - wanted).norm() / wanted.norm()) < 0.01


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Experts as gpt-oss stores them, whole and in parts, by their names in a plain checkpoint."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 48, 4, 16), dtype=torch.uint8)
    scales = torch.randint(118, 132, (3, 48, 4), dtype=torch.uint8)
    tensors = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    save_file(tensors | {"experts.gate_up_proj_bias": torch.ones(3, 48)}, tmp_path / "model.safetensors")
    weight_format = read_weight_format({"quantization_config": {"quant_method": "mxfp4"}})
    checkpoint = Checkpoint(tmp_path, weight_format=weight_format)
    assert checkpoint.tensors.keys() == {"experts.gate_up_proj", "experts.gate_up_proj_bias"}
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    whole = torch.empty(3, 128, 48, dtype=torch.bfloat16)
    checkpoint.fill({"experts.gate_up_proj": TensorPart(whole)})
    assert torch.equal(whole, expected)
    for dim, count in ((0, 3), (1, 8), (2, 3)):
        for index in range(count):
            wanted = expected.chunk(count, dim)[index]
            part = torch.empty_like(wanted)
            checkpoint.fill({"experts.gate_up_proj": TensorPart(part, dim, index, count)})
            assert torch.equal(part, wanted)


def test_stacked_fp8_experts_are_dequantized(tmp_path: Path) -> None:
    """A stack [experts, outputs, inputs] with the scales of its blocks, in bytes of powers of two."""
    torch.manual_seed(0)
    numbers = torch.randn(3, 40, 64).to(torch.float8_e4m3fn)
    powers = torch.randint(120, 130, (3, 3, 2), dtype=torch.uint8)
    tensors = {
        "experts.down_proj": numbers,
        "experts.down_proj_scale_inv": powers.view(torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"}
    checkpoint = Checkpoint(tmp_path, weight_format=read_weight_format({"quantization_config": config}))
    scales = torch.ldexp(torch.ones(powers.shape), powers.int() - 127)
    wide = scales.repeat_interleave(16, 1)[:, :40].repeat_interleave(32, 2)
    expected = numbers.float() * wide
    part = torch.empty(3, 20, 64)
    checkpoint.fill({"experts.down_proj": TensorPart(part, 1, 1, 2)})
    assert torch.equal(part, expected[:, 20:])
    checkpoint.fill({"experts.down_proj": TensorPart(part, 1, 1, 2, num_pieces=2)})
    assert torch.equal(part, torch.cat((expected[:, 10:20], expected[:, 30:]), dim=1))


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
    """The field, its value and what there is, before weights are read: there are none."""
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
"""What publishers write."""


@pytest.mark.parametrize("publisher", PUBLISHED)
def test_what_is_published_is_read(publisher: str) -> None:
    assert read_weight_format({"quantization_config": PUBLISHED[publisher]}) is not None


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


def test_a_bias_of_zeros_that_a_writer_added_is_no_error(tmp_path: Path) -> None:
    """Any other is: the tokens would silently be wrong."""
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


def test_a_plain_folder_has_no_format(quantized: Folders) -> None:
    assert read_format(quantized("awq").dequantized) is None
