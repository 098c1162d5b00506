"""Architectures with non-causal attention are refused in a sentence; windows and ropes are those that
transformers itself computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.loader import load_model
from engine.worker.models import transformers_model
from engine.worker.models.decoder import Decoder
from engine.worker.models.transformers_model import TransformersModel
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def saved(folder: Path, model_type: str, **fields: Any) -> PreTrainedModel:
    """Saves a small model with random weights in the folder, and returns it."""
    config = AutoConfig.for_model(model_type, **(SMALL | fields))
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif name.endswith("sinks"):
                parameter.normal_(1.0)
    model.save_pretrained(folder)
    model.train(False)
    return model


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Computes each token by a run over all earlier ones."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("doge", {}, "a mask of its own"),
        ("bert", {}, "not that of causal attention"),
    ],
)
def test_attention_that_is_not_plainly_causal_is_refused(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Unknown masks and arguments are refused, whatever their names."""
    AutoConfig.for_model(model_type, **(SMALL | fields)).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load_model(ModelConfig(model=str(tmp_path), load_format="dummy", max_model_len=64))
    assert "cannot be served" in str(caught.value)


def test_arguments_of_attention_that_are_not_known_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown argument is refused by name, because it may change the result."""
    monkeypatch.setattr(transformers_model, "_WITHOUT_BEARING", frozenset({"dropout"}))
    AutoConfig.for_model("starcoder2", **(SMALL | {"sliding_window": 9})).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="its attention uses sliding_window"):
        load_model(ModelConfig(model=str(tmp_path), load_format="dummy", max_model_len=64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("moshi", {"sliding_window": 9, "ffn_dim": 128, "num_key_value_heads": 4}, [None, None]),
        ("olmo3", {"sliding_window": 9, "num_hidden_layers": 4}, [9, 9, 9, None]),
        ("starcoder2", {"sliding_window": 9}, [9, 9]),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 16}, [9, None]),
        ("gemma2", {"sliding_window": 9, "head_dim": 16, "attn_logit_softcapping": 2.0}, [9, None]),
        ("gpt_oss", {"sliding_window": 9, "head_dim": 16, "num_local_experts": 4}, [9, None]),
        ("granite_swa", {"sliding_window": 9}, [None, 9]),
        ("cohere2", {"sliding_window": 9, "num_hidden_layers": 4}, [9, 9, 9, None]),
        ("olmoe", {"num_experts": 8}, [None, None]),
    ],
)
def test_windows_are_those_of_the_architecture(
    model_type: str, fields: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    """Windows are not those of the config, which some architectures ignore. The tokens are transformers',
    also with soft caps or sinks."""
    model = saved(tmp_path, model_type, **fields)
    loaded = load_model(ModelConfig(model=str(tmp_path), model_impl="transformers")).model
    assert isinstance(loaded, TransformersModel)
    assert loaded.windows == windows
    prompt = random_tokens(40, seed=1)
    engine = SmallEngine(tmp_path, num_blocks=96, model_impl="transformers")
    assert engine.generate(prompt)[:6] == greedy(model, prompt, 6)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_rope_of_some_layers_is_checked_like_one_of_all(kind: str, tmp_path: Path) -> None:
    """A rope that changes with the length is served up to its original length; the error names its layers."""
    ropes = {"full_attention": PLAIN, "sliding_attention": PLAIN} | {kind: LONG}
    model = saved(tmp_path, "olmo3", sliding_window=9, num_hidden_layers=4, rope_parameters=ropes)
    with pytest.raises(ModelLoadError, match=f"'longrope' of its {kind} layers .* at most 64"):
        load_model(ModelConfig(model=str(tmp_path)))
    prompt = random_tokens(20, seed=2)
    assert SmallEngine(tmp_path, max_model_len=64).generate(prompt)[:6] == greedy(model, prompt, 6)


def test_a_stretched_rope_of_some_layers_gives_its_length(tmp_path: Path) -> None:
    """The stretched rope of some layers gives the model's length, like one of all layers."""
    ropes = {"full_attention": YARN | {"factor": 8.0}, "sliding_attention": PLAIN}
    saved(tmp_path, "olmo3", sliding_window=9, num_hidden_layers=4, rope_parameters=ropes)
    assert load_model(ModelConfig(model=str(tmp_path))).max_model_len == 512


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"sliding_window": 9}),
        ("llama", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
        ("mistral", {"attention_bias": True, "mlp_bias": True, "sliding_window": 9}),
        ("qwen2", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"mlp_bias": True, "head_dim": 16}),
    ],
)
def test_fields_that_a_familys_code_does_not_read_count_for_nothing(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Fields of another family are ignored: our own decoder leaves out what transformers does."""
    model = saved(tmp_path, model_type, **fields)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert isinstance(load_model(ModelConfig(model=str(tmp_path))).model, Decoder)
    prompt = random_tokens(40, seed=1)
    assert SmallEngine(tmp_path, num_blocks=96).generate(prompt)[:6] == greedy(model, prompt, 6)


@pytest.mark.parametrize("name", ["deepseek-v3", "mimo-v2-flash", "gemma4", "gemma4-small"])
def test_heads_that_differ_run_through_transformers(name: str, model_folders: ModelFolders) -> None:
    """Values may be smaller than keys, and layers may differ in their heads, or attend to others' keys.
    Answers are transformers' own, with a chunked prompt and a hit."""
    folder = model_folders(name)
    options: dict[str, Any] = {"multiprocess": False, "max_model_len": 128, "max_num_batched_tokens": 32}
    reference = Reference(folder)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first = random_tokens(40, seed=1)
    with LLM(str(folder), device="cpu", model_impl="transformers", block_size=8, **options) as llm:
        for prompts in ([first, random_tokens(5, seed=2)], [[*first, 9, 8, 7]]):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == reference.greedy(prompt, 8)
