"""Checkpoints in fewer bits: each published format gives the tokens of the weights that it means, on one rank
and on two, by native models and through transformers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from engine.config.engine_config import ModelConfig
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.cpu.quantized_linear import Int8Linear
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.stored_tensor import TensorEntry, TensorFiles
from engine.worker.loading.loader import load_model
from engine.worker.loading.model_folder import read_format
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from engine.worker.models.transformers_model import TransformersModel
from tests.api.server import running_server
from tests.worker.generation import Reference, random_tokens
from tests.worker.loading.conftest import GREEDY, SIZES, Folders, generated, rank_of
from tests.worker.loading.quantized_folders import (
    WRITERS,
    write_quantized,
)
from tests.worker.parallel.ranks import two_ranks


@pytest.mark.parametrize("name", WRITERS)
def test_the_tokens_are_those_of_the_dequantized_weights(name: str, quantized: Folders) -> None:
    """Tokens equal those of transformers with a plain folder of the same weights."""
    folder = quantized(name)
    prompt = random_tokens(30, seed=4)
    assert generated(folder.path, prompt) == Reference(folder.dequantized).greedy(prompt, 16)


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_of_transformers_is_dequantized(name: str, other_family: Folders) -> None:
    """The library that wrote it is not needed."""
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


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "compressed-int8-zeros", "gptq-order", "compressed-int4-order"]
)
def test_the_parts_of_two_ranks_are_the_dequantized_weights(name: str, quantized: Folders) -> None:
    """The joined parts are equal; ranks may cut blocks and groups in two."""
    folder = quantized(name)
    whole = load_file(folder.dequantized / "model.safetensors")
    ranks = [rank_of(folder.path, rank).checkpoint_parts() for rank in range(2)]
    for tensor_name, tensor in whole.items():
        first, second = (parts[tensor_name] for parts in ranks)
        both = first.view if first.count == 1 else torch.cat((first.view, second.view), first.dim)
        assert torch.equal(both, tensor)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq-128", "compressed-int8"])
def test_two_ranks_give_the_same_tokens(name: str, quantized: Folders) -> None:
    """Weights are dequantized, in int4 with groups that the ranks cut, and in int8."""
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
    """Each of two ranks reads about half, scales and zeros included."""
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


@pytest.mark.parametrize("name", WRITERS)
def test_weights_are_dequantized_where_they_lie(name: str, quantized: Folders) -> None:
    """All computation is on the weights' device; here it is one without numbers."""
    folder = quantized(name)
    checkpoint = Checkpoint(folder.path, weight_format=read_format(folder.path))
    for tensor in folder.names[:7]:
        view = torch.empty(checkpoint.tensors[tensor].shape, device="meta")
        checkpoint.fill({tensor: TensorPart(view)})


def test_a_float16_checkpoint_is_read_in_bfloat16(tmp_path: Path) -> None:
    """Unless a type is requested, it is read in bfloat16, in which the CPU's kernels compute."""
    source = make_model_folder(tmp_path / "source", "llama", dtype="float16", **SIZES)  # type: ignore[arg-type]
    folder = write_quantized(source, tmp_path / "awq", WRITERS["awq"])
    assert load_model(ModelConfig(model=str(folder.path), device="cpu")).dtype == torch.bfloat16
    asked = load_model(ModelConfig(model=str(folder.path), device="cpu", dtype="float16"))
    assert asked.dtype == torch.float16
    assert load_model(ModelConfig(model=str(folder.dequantized), device="cpu")).dtype == torch.float16


def test_dequantized_weights_can_be_quantized_again(quantized: Folders) -> None:
    """``--quantization`` applies to weights that do not stay quantized."""
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


def test_a_plain_folder_has_no_format(quantized: Folders) -> None:
    assert read_format(quantized("awq").dequantized) is None
