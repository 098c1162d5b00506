"""Requests with different adapters in one batch get peft's results."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.engine_config import ModelConfig
from engine.config.lora import LoRAConfig
from engine.errors import ConfigError, RequestError
from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput
from engine.records.adapters import CONFIG_FILE, WEIGHTS_FILE, LoRARequest, find_adapter
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.lora.adapter_store import STEPS_TO_STAY, open_adapters
from engine.worker.parallel.group import ALONE
from tests.worker.conftest import VARIANTS
from tests.worker.cpu.compiled_steps import has_compiled_steps
from tests.worker.generation import random_tokens
from tests.worker.lora.made_adapters import AdaptedReference, save_adapter

# peft and today's transformers warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

Case = tuple[list[int], LoRARequest | None, Path | None]

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 4,
    "max_lora_rank": 16,
    "num_gpu_blocks_override": 200,
    "max_model_len": 256,
}
WIDE = {**OPTIONS, "max_model_len": 1024}
COMPILED: dict[str, Any] = {
    "hidden_size": 128,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 64,
    "dtype": "bfloat16",
}
"""A model of sizes that compiled steps support."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention alone": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 32},
    "ranks and alphas by module": {
        "r": 5,
        "lora_alpha": 7,
        "rank_pattern": {"down_proj": 11},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
        "use_rslora": True,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen2, with biases": {"family": "qwen2"},
    "gemma3, with norms of outputs": {"family": "gemma3_text"},
}


def save_all(model: Path, folder: Path, **config: Any) -> dict[str, Path]:
    return {
        kind: save_adapter(model, folder / str(seed), seed, **{**config, **fields})
        for seed, (kind, fields) in enumerate(KINDS.items())
    }


def prompts_and_adapters(
    adapters: dict[str, Path],
) -> list[tuple[list[int], LoRARequest | None, Path | None]]:
    """Two prompts for each adapter, and two without."""
    named = [*adapters.items(), ("", None)]
    return [
        (
            random_tokens(5 + 9 * index, seed=index),
            None if path is None else LoRARequest(kind, 1, str(path)),
            path,
        )
        for index, (kind, path) in enumerate(named * 2)
    ]


def check_tokens(llm: LLM, model: Path, cases: list[Case]) -> None:
    """Runs all cases in one batch, and compares the tokens with peft's."""
    prompts, requests = [prompt for prompt, _, _ in cases], [one for _, one, _ in cases]
    outputs = llm.generate(prompts, GREEDY, lora_request=requests, use_tqdm=False)
    for output, (prompt, _, path) in zip(outputs, cases, strict=True):
        expected = AdaptedReference(model, path).greedy(prompt, len(output.outputs[0].token_ids))
        assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_request_has_its_adapters_tokens(tmp_path: Path, name: str) -> None:
    model = make_model_folder(tmp_path / "model", **MODELS[name])
    cases = prompts_and_adapters(save_all(model, tmp_path))
    with LLM(model, multiprocess=False, **OPTIONS) as llm:
        check_tokens(llm, model, cases)


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_adapters_of_linears_that_a_checkpoint_joins(tmp_path: Path, family: str) -> None:
    """Queries, keys and values in one linear, or gates and ups."""
    model = make_model_folder(tmp_path / "model", family=family)
    adapters = {str(seed): save_adapter(model, tmp_path / str(seed), seed) for seed in range(2)}
    with LLM(model, multiprocess=False, **OPTIONS) as llm:
        check_tokens(llm, model, prompts_and_adapters(adapters))


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "phi", "qwen3_moe"])
def test_adapters_of_models_through_transformers(tmp_path: Path, family: str) -> None:
    """Adapters change the linears of transformers' own code, but for experts."""
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = make_model_folder(
        tmp_path / "model", family=family, extra_config=extra if family == "qwen3_moe" else None
    )
    targets = ["q_proj", "v_proj"] if family == "qwen3_moe" else "all-linear"
    adapters = {
        str(seed): save_adapter(model, tmp_path / str(seed), seed, target_modules=targets)
        for seed in range(2)
    }
    with LLM(model, multiprocess=False, model_impl="transformers", **OPTIONS) as llm:
        check_tokens(llm, model, prompts_and_adapters(adapters))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi", "qwen3_moe"])
def test_ranks_have_parts_of_transformers_models(tmp_path: Path, family: str) -> None:
    """Linears are split by outputs and by inputs, as are their adapters, and experts by both."""
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = make_model_folder(
        tmp_path / "model", family=family, extra_config=extra if family == "qwen3_moe" else None
    )
    targets = ["q_proj", "v_proj", "o_proj"] if family == "qwen3_moe" else "all-linear"
    adapters = {"one": save_adapter(model, tmp_path / "one", 1, target_modules=targets)}
    with LLM(model, model_impl="transformers", tensor_parallel_size=2, **OPTIONS) as llm:
        check_tokens(llm, model, prompts_and_adapters(adapters))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gemma4", ["q_proj", "k_proj", "o_proj"]),
        ("gemma4-small", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("falcon-h1", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("olmo-hybrid", ["gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_adapters_of_unusual_layers(tmp_path: Path, name: str, targets: list[str]) -> None:
    """Gemma 4's layers differ in their heads; some have no values of their own, or neither. Falcon-H1's have
    attention and a state."""
    model = make_model_folder(tmp_path / "model", **VARIANTS[name])
    adapters = {
        str(seed): save_adapter(model, tmp_path / str(seed), seed, target_modules=targets)
        for seed in range(2)
    }
    with LLM(model, multiprocess=False, **OPTIONS) as llm:
        check_tokens(llm, model, prompts_and_adapters(adapters))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_have_parts_of_adapters(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make_model_folder(tmp_path / "model")
    cases = prompts_and_adapters(save_all(model, tmp_path))
    with LLM(model, **options, **OPTIONS) as llm:
        check_tokens(llm, model, cases)


@pytest.mark.skipif(not has_compiled_steps(), reason="steps cannot be compiled here")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_compiled_steps_add_adapters(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """In bf16 they err hardly more than peft, which keeps adapters in fp32: in short prompts, in one of
    several blocks of rows, and in later tokens. A row's adapter does not depend on other rows."""
    model = make_model_folder(tmp_path / "model", family, **COMPILED)
    adapters = save_all(model, tmp_path)
    cases = prompts_and_adapters(adapters)
    cases += [
        (random_tokens(700, seed=99), LoRARequest("plain", 1, str(adapters["plain"])), adapters["plain"])
    ]
    with caplog.at_level(logging.INFO), LLM(model, multiprocess=False, **WIDE) as llm:
        outputs = answers(llm, cases)
        assert [answers(llm, [case])[0].token_ids for case in cases[:4]] == [o.token_ids for o in outputs[:4]]
    assert "Using the compiled CPU backend for whole steps." in caplog.messages
    ours, of_peft = [], []
    for answer, (prompt, _, path) in zip(outputs, cases, strict=True):
        tokens = [*prompt, *answer.token_ids]
        exact = AdaptedReference(model, path).logprobs(tokens)
        rounded = AdaptedReference(model, path, torch.bfloat16).logprobs(tokens)
        for place, (token, told) in enumerate(zip(answer.token_ids, answer.logprobs or [], strict=True)):
            before = len(prompt) + place - 1
            ours.append(abs(told.chosen.logprob - float(exact[before, token])))
            of_peft.append(abs(float(rounded[before, token] - exact[before, token])))
    assert fmean(ours) < 1.6 * fmean(of_peft), (fmean(ours), fmean(of_peft))


@pytest.mark.skipif(not has_compiled_steps(), reason="steps cannot be compiled here")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_of_quantized_bases(tmp_path: Path, quantization: str) -> None:
    """With a quantized base, an adapter changes the probability as it should."""
    model = make_model_folder(tmp_path / "model", **COMPILED)
    cases = prompts_and_adapters(save_all(model, tmp_path))[:3]
    with LLM(model, multiprocess=False, quantization=quantization, **WIDE) as llm:
        outputs = answers(llm, cases)
    for answer, (prompt, _, path) in zip(outputs, cases, strict=True):
        tokens = [*prompt, *answer.token_ids]
        adapted, plain = (
            AdaptedReference(model, each).logprobs(tokens)[len(prompt) - 1] for each in (path, None)
        )
        first = answer.token_ids[0]
        told = (answer.logprobs or [])[0].chosen.logprob
        assert abs(told - float(adapted[first])) < abs(told - float(plain[first]))


def answers(llm: LLM, cases: list[Case]) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts, requests = [prompt for prompt, _, _ in cases], [one for _, one, _ in cases]
    outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    folder = tmp_path_factory.mktemp("served")
    model = make_model_folder(folder / "model")
    with LLM(model, multiprocess=False, **OPTIONS) as llm:
        yield model, llm


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "does not say peft_type LORA"),
    "magnitudes": ({"use_dora": True}, "use_dora is not supported"),
    "biases": ({"bias": "all"}, "bias is not supported"),
    "other modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "a field of tomorrow": ({"use_tomorrow": 1}, "use_tomorrow is not supported"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base model"),
    "no number": ({"lora_alpha": "much"}, "lora_alpha must be a number"),
    "no number of a pattern": ({"alpha_pattern": {"q_proj": "much"}}, "alpha_pattern must have a number"),
    "no patterns": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must have a number"),
    "no name": ({"alpha_pattern": {"(": 3}}, r"alpha_pattern holds '\(', which is no name"),
    "a pattern that never ends": (
        {"alpha_pattern": {r"(([a-z_\.0-9])+)+!": 1}},
        "alpha_pattern holds .* which is no name",
    ),
    "too many patterns": (
        {"alpha_pattern": {f"layers.{n}.*": 1 for n in range(300)}},
        "alpha_pattern holds more than 256 patterns with wildcards",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_supported_is_named(served: tuple[Path, LLM], tmp_path: Path, name: str) -> None:
    model, llm = served
    changes, message = FAULTS[name]
    folder = save_adapter(model, tmp_path / "adapter", 1)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2, 3], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)), use_tqdm=False)
    assert llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].finished


def damaged(weights: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    down = weights[f"{prefix}.lora_A.weight"]
    match how:
        case "infinite":
            down[0, 0] = torch.inf
        case "whole numbers":
            weights[f"{prefix}.lora_A.weight"] = down.to(torch.int8)
        case "half":
            del weights[f"{prefix}.lora_A.weight"]
        case "narrow":
            weights[f"{prefix}.lora_A.weight"] = down[:, :-1].contiguous()
        case "deep":
            renamed = f"{prefix.replace('layers.0', 'layers.9')}.lora_A.weight"
            weights[renamed] = weights.pop(f"{prefix}.lora_A.weight")
        case "head":
            weights["base_model.model.lm_head.lora_A.weight"] = down.clone()
    return weights


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("infinite", "weights that are not finite"),
        ("whole numbers", "weights that are no floating-point numbers"),
        ("half", r"needs lora_A \[rank, inputs\] and lora_B"),
        ("narrow", "has other sizes in this model"),
        ("deep", "needs lora_A"),
        ("head", "tensor base_model.model.lm_head.lora_A.weight belongs to no linear of a layer"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    served: tuple[Path, LLM], tmp_path: Path, how: str, message: str
) -> None:
    model, llm = served
    folder = save_adapter(model, tmp_path / "adapter", 1)
    weights = damaged(load_file(folder / WEIGHTS_FILE), how)
    save_file(weights, folder / WEIGHTS_FILE)
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2, 3], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)), use_tqdm=False)


def test_steps_under_way_keep_what_is_dropped(served: tuple[Path, LLM], tmp_path: Path) -> None:
    """A request may end while its step is queued, and its adapter be dropped before that step runs."""
    model, _ = served
    store = open_adapters(load_model(ModelConfig(model=str(model))).model, LoRAConfig(), ALONE, "torch")
    assert store is not None
    adapter = find_adapter("sql", str(save_adapter(model, tmp_path / "adapter", 1)))
    store.load(adapter)
    store.drop(adapter.key)
    store.begin_step([adapter.key, None], np.array([1, 2]))
    assert store.step.of_row is not None
    assert store.step.of_row.tolist() == [0, -1, -1]
    for _ in range(STEPS_TO_STAY + 1):
        store.begin_step([None], np.array([1]))
    with pytest.raises(KeyError):
        store.begin_step([adapter.key], np.array([1]))


def test_ranks_are_bounded(served: tuple[Path, LLM], tmp_path: Path) -> None:
    model, llm = served
    folder = save_adapter(model, tmp_path / "adapter", 1, r=17)
    with pytest.raises(RequestError, match="has rank 17, and max_lora_rank is 16"):
        llm.generate([1, 2, 3], GREEDY, lora_request=LoRARequest("big", 1, str(folder)), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 2}, "max_loras needs enable_lora"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras must be at least 1"),
        ({"enable_lora": True, "max_lora_rank": 513}, "max_lora_rank must be at most 512"),
        ({"enable_lora": True, "lora_modules": ["sql"]}, "lora_modules must be NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["sql=/nowhere"]}, "lora_path must be a folder"),
        ({"enable_lora": True, "attention_backend": "triton"}, "enable_lora needs attention_backend torch"),
    ],
)
def test_wrong_options_are_named(served: tuple[Path, LLM], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(served[0], multiprocess=False, num_gpu_blocks_override=50, max_model_len=64, **options)


def test_without_adapters_none_is_taken(served: tuple[Path, LLM], tmp_path: Path) -> None:
    asked = LoRARequest("any", 1, str(tmp_path))
    with (
        LLM(served[0], multiprocess=False, num_gpu_blocks_override=50, max_model_len=64) as llm,
        pytest.raises(RequestError, match="lora_request needs enable_lora"),
    ):
        llm.generate([1, 2, 3], GREEDY, lora_request=asked, use_tqdm=False)
