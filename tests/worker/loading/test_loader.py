"""Every error in a model folder is reported in one clear sentence of the right type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.worker.loading.loader import load_model
from engine.worker.models.decoder import Decoder
from engine.worker.models.transformers_model import TransformersModel
from tests.worker.conftest import ModelFolders
from tests.worker.generation import SmallEngine, random_tokens

Damaged = Callable[[str], Path]


@pytest.fixture
def damaged(model_folders: ModelFolders, tmp_path: Path) -> Damaged:
    """Copies a variant's folder, so that a test can damage it."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(model_folders(name), tmp_path / name))

    return copy


def refusal(folder: Path | str, **options: str | int) -> str:
    """The sentence with which loading fails."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(model=str(folder), **options))  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_missing_tensor_is_named(name: str, damaged: Damaged) -> None:
    """A checkpoint without one of its tensors is refused with that tensor's name."""
    folder = damaged(name)
    victim = sorted(load_file(folder / "model.safetensors"))[-2]
    edit_tensors(folder, lambda tensors: tensors.pop(victim))
    assert f"Tensor {victim} of " in refusal(folder)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_an_unexpected_shape_is_named(name: str, damaged: Damaged) -> None:
    """A tensor of another shape is refused with its name and both shapes."""
    folder = damaged(name)
    victim = next(n for n in load_file(folder / "model.safetensors") if "mlp" in n and n.endswith("weight"))
    edit_tensors(folder, lambda tensors: tensors.update({victim: torch.zeros(3, 5)}))
    sentence = refusal(folder)
    assert victim in sentence
    assert "[3, 5]" in sentence


def test_a_tensor_without_use_is_named(damaged: Damaged) -> None:
    """A bias that the architecture would ignore is an error: without it, tokens would silently be wrong."""
    folder = damaged("llama")
    extra = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({extra: torch.zeros(64)}))
    assert extra in refusal(folder)


def test_an_unknown_architecture_is_named(damaged: Damaged) -> None:
    """A model type that transformers does not know is refused by its architecture's name."""
    folder = damaged("llama")
    edit_config(folder, model_type="sphinx", architectures=["SphinxForCausalLM"])
    assert "'SphinxForCausalLM'" in refusal(folder)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("whisper", {}, "encoder-decoder"),
        ("mamba", {"num_hidden_layers": 2, "hidden_size": 64}, "attention"),
        ("stablelm", {"num_hidden_layers": 2}, "attention interface"),
        ("gptj", {"n_layer": 2}, "attention interface"),
        ("vit", {}, "no causal language model"),
    ],
)
def test_an_architecture_that_cannot_be_paged_says_why(
    model_type: str, fields: dict[str, int], reason: str, tmp_path: Path
) -> None:
    """Encoder-decoders, state spaces and models outside the attention interface are refused with a reason."""
    AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    sentence = refusal(tmp_path, load_format="dummy", max_model_len=64)
    assert reason in sentence
    assert "cannot be served" in sentence


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    """A missing path, a file, and a folder without a config are each reported as such."""
    assert f"{tmp_path}/nowhere does not exist" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")


def test_a_hub_name_that_cannot_be_had(tmp_path: Path) -> None:
    """Without the hub, a hub name fails at once and says that both places were tried."""
    assert "could not be fetched from the Hugging Face hub" in refusal("nobody/no-such-model")


def test_weights_that_are_absent_cut_or_pickled(damaged: Damaged) -> None:
    """A folder without safetensors, with a shard missing, cut short or garbled is refused before loading."""
    folder = damaged("qwen3")
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    assert "is cut short" in refusal(folder)
    shard.write_bytes(b"not safetensors")
    assert "no valid safetensors header" in refusal(folder)
    shard.unlink()
    assert shard.name in refusal(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "holds no weights" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "convert it to safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_files_beside_the_weights_are_left_alone(name: str, damaged: Damaged) -> None:
    """Adapters, other libraries' names, and an old upload's index are ignored: like transformers, we read
    model.safetensors. Pickled weights next to it are not read."""
    folder = damaged(name)
    prompt = random_tokens(30, seed=1)
    expected = SmallEngine(folder).generate(prompt)
    other = {"lora.weight": torch.zeros(4, 4)}
    for file in ("consolidated.safetensors", "adapter_model.safetensors", "model-00001-of-00002.safetensors"):
        save_file(other, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {"lora.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert SmallEngine(folder).generate(prompt) == expected


def test_the_file_that_the_config_names_is_read(damaged: Damaged) -> None:
    """The named file is preferred to any other; one outside the folder is refused."""
    folder = damaged("llama")
    prompt = random_tokens(30, seed=1)
    expected = SmallEngine(folder).generate(prompt)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file({"lora.weight": torch.zeros(4, 4)}, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, transformers_weights="weights.safetensors")
    assert SmallEngine(folder).generate(prompt) == expected
    edit_config(folder, transformers_weights="../llama/weights.safetensors")
    assert "not in its folder" in refusal(folder)
    edit_config(folder, transformers_weights="none.safetensors")
    assert "none.safetensors named by config.json is missing" in refusal(folder)


def test_shards_are_found_without_an_index_and_held_to_one(damaged: Damaged) -> None:
    """Shards are read without an index, next to an adapter; a tensor in two files or elsewhere is refused."""
    folder = damaged("qwen3")
    prompt = random_tokens(30, seed=1)
    expected = SmallEngine(folder).generate(prompt)
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    index.unlink()
    save_file({"lora.weight": torch.zeros(4, 4)}, folder / "adapter_model.safetensors")
    assert SmallEngine(folder).generate(prompt) == expected
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00003.safetensors")
    assert "is both in" in refusal(folder)
    name = next(iter(told["weight_map"]))
    for wrong in ("../elsewhere.safetensors", 5, None):
        index.write_text(json.dumps({"weight_map": told["weight_map"] | {name: wrong}}))
        assert "weight" in refusal(folder)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_tensors_of_another_type_are_cast_or_refused(
    name: str, damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    """Other floats are cast and logged; other types are refused, as are values beyond float16."""
    folder = damaged(name)
    kept = load_file(folder / "model.safetensors")
    expected = SmallEngine(folder).generate(random_tokens(30, seed=1))

    def stored(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        save_file(
            {key: change(x) for key, x in kept.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    stored(torch.Tensor.double)
    with caplog.at_level("INFO"):
        assert SmallEngine(folder).generate(random_tokens(30, seed=1)) == expected
    assert "from float64 to float32" in caplog.text
    stored(lambda x: x.to(torch.float8_e4m3fn))
    assert "is stored as F8_E4M3" in refusal(folder)
    stored(lambda x: x.to(torch.int8))
    assert "is stored as I8" in refusal(folder)
    stored(lambda x: x * 1e30)
    assert "float16" in refusal(folder, dtype="float16")


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_too_little_memory_names_both_sizes(family: str, tmp_path: Path) -> None:
    """Weights beyond the memory are refused before a byte is allocated, with needed and available bytes."""
    config = AutoConfig.for_model(family, hidden_size=2**15, num_hidden_layers=2**9, intermediate_size=2**17)
    config.save_pretrained(tmp_path)
    assert "bytes) are available" in refusal(tmp_path, load_format="dummy")


def test_rope_that_changes_with_length_is_served_up_to_its_original_length(tmp_path: Path) -> None:
    """Dynamic rope cannot be batched beyond its original length; the sentence says what length can."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )
    config.save_pretrained(tmp_path)
    assert "max_model_len to at most 128" in refusal(tmp_path, load_format="dummy")
    loaded = load_model(ModelConfig(model=str(tmp_path), load_format="dummy", max_model_len=128))
    assert isinstance(loaded.model, TransformersModel)


def test_dummy_weights_are_seeded(model_folders: ModelFolders) -> None:
    """Random weights need no weight file, and are the same for the same seed."""
    folder = str(model_folders("llama"))
    first, same, other = (
        load_model(ModelConfig(model=folder, load_format="dummy", seed=seed)).model for seed in (1, 1, 2)
    )
    assert isinstance(first, Decoder)
    assert isinstance(same, Decoder)
    assert isinstance(other, Decoder)
    ids = torch.arange(64)
    assert torch.equal(first.embedded(ids), same.embedded(ids))
    assert not torch.equal(first.embedded(ids), other.embedded(ids))


def test_shards_and_one_file_hold_the_same_model(damaged: Damaged) -> None:
    """A sharded folder and the same tensors in one file give the same tokens."""
    sharded, single = damaged("mistral"), damaged("mistral-window")
    tensors: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, single / "model.safetensors", metadata={"format": "pt"})
    edit_config(single, sliding_window=None)
    prompt = random_tokens(30, seed=1)
    assert SmallEngine(sharded).generate(prompt) == SmallEngine(single).generate(prompt)


@pytest.mark.parametrize("option", ["load_format", "model_impl"])
def test_a_wrong_option_lists_the_right_ones(option: str, model_folders: ModelFolders) -> None:
    """An unknown value of an option is a configuration error that lists the known ones."""
    with pytest.raises(ConfigError, match=rf"{option} must be one of auto, .* got 'magic'"):
        load_model(ModelConfig(model=str(model_folders("llama")), **{option: "magic"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_without_end_or_bottom_is_one_sentence(file: str, damaged: Damaged) -> None:
    folder = damaged("qwen3")
    for content in (b'{"a":' * 100_000, b"\xff\xfe", b"[" * 100_000):
        (folder / file).write_bytes(content)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        assert file in refusal(folder)


@pytest.mark.parametrize("size", [2**62, -1, 10**400])
@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_sizes_that_no_model_has_are_refused(field: str, size: int, damaged: Damaged) -> None:
    """The size is refused before memory is allocated by it."""
    folder = damaged("qwen3")
    edit_config(folder, **{field: size})
    assert f"{field} must be from 0 to" in refusal(folder)
