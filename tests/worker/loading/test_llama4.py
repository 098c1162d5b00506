"""Folders of Llama 4 in their published form: a decoder with a vision tower, in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.decoder import Decoder
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens


def with_vision(folder: Path, to: Path) -> Path:
    """Turns the folder into one of ``Llama4ForConditionalGeneration``."""
    to.mkdir()
    tensors = {f"language_model.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    tensors["vision_model.class_embedding"] = torch.zeros(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(8, 8)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    text: dict[str, Any] = json.loads((folder / "config.json").read_text())
    fields = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "dtype": text.pop("dtype"),
        "text_config": text,
        "vision_config": {"model_type": "llama4_vision_model"},
    }
    (to / "config.json").write_text(json.dumps(fields))
    return to


def test_a_vision_tower_is_left_out(model_folders: ModelFolders, tmp_path: Path) -> None:
    """With a vision tower in its folder, the decoder gives the same tokens as alone."""
    folder = model_folders("llama4")
    both = with_vision(folder, tmp_path / "both")
    loaded = load_model(ModelConfig(model=str(both)))
    assert isinstance(loaded.model, Decoder)
    assert loaded.dtype == torch.float32
    prompt = random_tokens(50, seed=1)
    assert SmallEngine(both).generate(prompt) == Reference(folder).greedy(prompt, 24)


def test_a_missing_tensor_of_the_decoder_is_named(model_folders: ModelFolders, tmp_path: Path) -> None:
    folder = with_vision(model_folders("llama4"), tmp_path / "both")
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.model.layers.1.feed_forward.router.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = "Tensor model.layers.1.feed_forward.router.weight of Llama4ForConditionalGeneration is missing"
    with pytest.raises(ModelLoadError, match=told):
        load_model(ModelConfig(model=str(folder)))


def test_through_transformers_it_is_refused(model_folders: ModelFolders) -> None:
    """transformers' code for Llama 4 is refused, because it needs its own cache for positions."""
    with pytest.raises(
        ModelLoadError, match="'Llama4ForCausalLM' cannot be served: it has chunked_attention"
    ):
        load_model(ModelConfig(model=str(model_folders("llama4")), model_impl="transformers"))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_in_bf16_it_is_near_to_fp32(tmp_path: Path, quantization: str | None) -> None:
    """The compiled kernels' probabilities of the next token after several chunks are near to fp32's."""
    folder = make_model_folder(
        tmp_path,
        "llama4_text",
        num_layers=4,
        hidden_size=128,
        intermediate_size=64,
        dtype="bfloat16",
        extra_config={
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "num_local_experts": 4,
        },
    )
    wanted = first_logprobs(folder, dtype="float32")
    got = first_logprobs(folder, quantization=quantization)
    shared = wanted.keys() & got.keys()
    assert len(shared) > 5
    for token in shared:
        assert got[token] == pytest.approx(wanted[token], abs=0.1)


def first_logprobs(folder: Path, **options: Any) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after a prompt of several chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=10)
    with LLM(
        str(folder),
        multiprocess=False,
        max_model_len=128,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=64,
        **options,
    ) as llm:
        (output,) = llm.generate([random_tokens(90, seed=2)], params, use_tqdm=False)
    told = output.outputs[0].logprobs
    assert told is not None
    return {each.token_id: each.logprob for each in told[0].top}
