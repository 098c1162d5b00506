"""Mixtures of experts in quantized checkpoints: each expert on its own, or stacked."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config.engine_config import ModelConfig
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_experts import PackedExperts
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.weight_format import read_weight_format
from engine.worker.loading.loader import load_model
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.worker.generation import Reference, random_tokens
from tests.worker.loading.conftest import generated
from tests.worker.loading.quantized_folders import (
    KEPT,
    WRITERS,
    QuantizedFolder,
    mxfp4,
    write_quantized,
)
from tests.worker.parallel.ranks import LoneRank, two_ranks


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


def gpt_oss_in_mxfp4(path: Path) -> QuantizedFolder:
    source = sparse_folder(
        path / "source",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return write_quantized(source, path / "mxfp4", mxfp4())


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_gpt_oss_in_mxfp4_gives_the_same_tokens(model_impl: str, tmp_path: Path) -> None:
    folder = gpt_oss_in_mxfp4(tmp_path)
    assert len(folder.names) == 4
    prompt = random_tokens(40, seed=8)
    wanted = Reference(folder.dequantized).greedy(prompt, 16)
    assert generated(folder.path, prompt, model_impl=model_impl) == wanted


def test_mxfp4_that_stays_gives_the_tokens_of_bf16(
    tmp_path: Path, compiled: CompiledGemm, caplog: pytest.LogCaptureFixture
) -> None:
    """In compiled steps all tokens are equal: nothing is rounded."""
    folder, prompt = gpt_oss_in_mxfp4(tmp_path), random_tokens(40, seed=8)
    wanted = generated(folder.dequantized, prompt, dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        assert generated(folder.path, prompt, dtype="bfloat16") == wanted
    assert "MXFP4 weights stay quantized" in caplog.text
    assert "dequantized" not in caplog.text
    assert "Using the compiled CPU backend for whole steps." in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("by_rank", [False, True])
def test_two_ranks_read_their_part_of_mxfp4(by_rank: bool, tmp_path: Path) -> None:
    folder = gpt_oss_in_mxfp4(tmp_path)
    prompt = random_tokens(40, seed=8)
    with two_ranks(folder.path, enable_expert_parallel=by_rank) as engine:
        assert engine.generate(prompt)[:16] == Reference(folder.dequantized).greedy(prompt, 16)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-order", "compressed-int4"])
def test_experts_in_a_format_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    """The checkpoint has tensors for each expert, like Qwen3-MoE's."""
    source = sparse_folder(
        tmp_path / "source", "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    folder = write_quantized(source, tmp_path / name, WRITERS[name])
    assert sum(".experts." in tensor for tensor in folder.names) == 24
    prompt = random_tokens(40, seed=9)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["awq", "compressed-int4", "compressed-int8", "mxfp4"])
def test_experts_stay_in_their_bits(name: str, tmp_path: Path, compiled: CompiledGemm) -> None:
    """Experts stay quantized, also on two ranks with a part of every expert or some whole ones; only scales
    and zeros, where there are any, are rounded."""
    source = sparse_folder(
        tmp_path / "source",
        "gpt_oss" if name == "mxfp4" else "qwen3_moe",
        hidden_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        **{"intermediate_size" if name == "mxfp4" else "moe_intermediate_size": 128},
    )
    folder = write_quantized(source, tmp_path / name, mxfp4() if name == "mxfp4" else WRITERS[name])
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0]]).repeat(3, 1)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))

    def experts_of(path: Path, group: TensorParallelGroup = ALONE, *, by_rank: bool = False) -> torch.Tensor:
        options = ModelConfig(model=str(path), device="cpu", dtype="bfloat16", enable_expert_parallel=by_rank)
        model = load_model(options, group).model
        assert isinstance(model, Decoder)
        experts = model.layers[1].get_submodule("mlp.experts")
        assert isinstance(experts, PackedExperts)
        expected = 16 if path == folder.dequantized else KEPT.get(name, 4)
        assert experts.address().gate_up.bits == experts.address().down.bits == expected
        output: torch.Tensor = experts(x, chosen, weights)
        return output.float()

    wanted = experts_of(folder.dequantized)
    found = experts_of(folder.path)
    ranks = [
        sum(experts_of(folder.path, LoneRank(rank, 2), by_rank=by_rank) for rank in range(2))
        for by_rank in (False, True)
    ]
    assert name != "mxfp4" or torch.equal(found, wanted)
    for output in (found, *ranks):
        assert float((output - wanted).norm() / wanted.norm()) < 0.01


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """gpt-oss's stored experts are read, whole and in parts, under their names in a plain checkpoint."""
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
    """A stack [experts, outputs, inputs] has scales of blocks, in bytes of powers of two."""
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
