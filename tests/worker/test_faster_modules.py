"""Models that run through transformers get packed or quantized linears, and RMS norms of one operation."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.cpu.packed_weights import PackedWeightLinear, compiled_gemm
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder
from engine.worker.models.faster_modules import RowsLinear, replace_norms
from engine.worker.models.transformers_model import TransformersModel
from tests.worker.generation import random_tokens
from tests.worker.test_other_attention import saved

PROMPT = random_tokens(40, seed=3)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "norms of inputs": {"family": "qwen3"},
    "a tied head": {"family": "llama", "tie": True},
    "norms of outputs": {"family": "olmo2"},
    "layer norms": {"family": "gpt_neox"},
    "biases": {"family": "phi"},
}
NEAR = {None: 0.1, "int8": 0.1, "int4": 0.8}
"""By how much a token's log-probability may differ from that in fp32, by quantization."""


def made(tmp_path: Path, **fields: Any) -> Path:
    return make_model_folder(tmp_path / "model", hidden_size=128, dtype="bfloat16", **fields)


def loaded(folder: Path) -> TransformersModel:
    model = load_model(ModelConfig(model=str(folder), model_impl="transformers", max_model_len=128)).model
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("quantization", NEAR)
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_as_probable(name: str, quantization: str | None, tmp_path: Path) -> None:
    check_probable(made(tmp_path, **FAMILIES[name]), quantization)


def check_probable(folder: Path, quantization: str | None) -> None:
    """Asserts that the tokens of an answer are about as probable as with transformers in fp32."""
    options: dict[str, Any] = {"multiprocess": False, "device": "cpu", "max_model_len": 128}
    with LLM(str(folder), model_impl="transformers", quantization=quantization, **options) as llm:
        (output,) = llm.generate([PROMPT], LOGPROBS, use_tqdm=False)
    answer = output.outputs[0]
    tokens = torch.tensor([[*PROMPT, *answer.token_ids]])
    with torch.inference_mode():
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits[0]
    wanted = exact[len(PROMPT) - 1 : -1].log_softmax(-1)
    for place, (token, told) in enumerate(zip(answer.token_ids, answer.logprobs or [], strict=True)):
        assert abs(told.chosen.logprob - float(wanted[place, token])) < NEAR[quantization]


def test_all_linears_and_norms_are_replaced(tmp_path: Path) -> None:
    """Of an architecture of Llama's kind none is left."""
    if compiled_gemm(32, torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("there is no compiled GEMM: it needs a compiler and a CPU with AVX512_BF16")
    model = loaded(made(tmp_path, family="qwen3"))._model
    assert model is not None
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("RowsLinear") == kinds.count(PackedWeightLinear.__name__) == 2 * 7 + 1
    assert not {"Linear", "Qwen3RMSNorm"} & set(kinds)


def test_code_that_reads_weights_keeps_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model's code does not run with other modules, it is loaded again; it cannot be quantized."""

    def wrong(*arguments: Any, **options: Any) -> None:
        raise AttributeError("'RowsLinear' object has no attribute 'weight'")

    folder = made(tmp_path, family="olmo2")
    monkeypatch.setattr(RowsLinear, "forward", wrong)
    model = loaded(folder)._model
    assert model is not None
    assert not any(isinstance(module, RowsLinear) for module in model.modules())
    with pytest.raises(ModelLoadError, match="cannot be served: replaced modules end in AttributeError"):
        load_model(ModelConfig(model=str(folder), quantization="int8", max_model_len=128))


def test_other_logits_are_no_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial run compares logits."""
    forward = RowsLinear.forward
    monkeypatch.setattr(RowsLinear, "forward", lambda self, x: 2 * forward(self, x))
    model = loaded(made(tmp_path, family="olmo2"))._model
    assert model is not None
    assert not any(isinstance(module, RowsLinear) for module in model.modules())


def test_a_norm_that_centers_is_no_rms_norm(tmp_path: Path) -> None:
    """Norms are known by what they compute, not by their names."""

    class ShiftedRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (16,), 1 + self.weight, self.eps)

    module = torch.nn.Sequential(ShiftedRMSNorm())
    replace_norms(module)  # type: ignore[arg-type]
    assert isinstance(module[0], ShiftedRMSNorm)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_are_ours(quantization: str | None, tmp_path: Path) -> None:
    """Packed, or quantized, they are chosen and weighted by the model's own router."""
    if compiled_gemm(32, torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("there is no compiled GEMM: it needs a compiler and a CPU with AVX512_BF16")
    folder = made(tmp_path, family="qwen3_moe", extra_config=EXPERTS)
    check_probable(folder, quantization)
    model = loaded(folder)._model
    assert model is not None
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("RoutedExperts") == kinds.count("PackedExperts") == 2


def test_other_weights_are_not_quantized(tmp_path: Path) -> None:
    """Weights that would stay in 16 bits are named."""
    folder = make_model_folder(tmp_path)  # for its tokenizer
    saved(folder, "gpt_oss", num_local_experts=4, num_key_value_heads=2)
    options: dict[str, Any] = {"quantization": "int8", "model_impl": "transformers", "max_model_len": 128}
    with pytest.raises(ConfigError, match=r"has model.layers.0.mlp.experts.gate_up_proj\.$"):
        load_model(ModelConfig(model=str(folder), **options))


def test_experts_need_kernels_to_be_quantized(tmp_path: Path) -> None:
    """That they are not there is said, as for native experts."""
    folder = make_model_folder(tmp_path / "model", "qwen3_moe", extra_config=EXPERTS)
    options: dict[str, Any] = {"quantization": "int8", "model_impl": "transformers", "dtype": "float32"}
    with pytest.raises(ConfigError, match="mixture of experts needs the compiled kernels"):
        load_model(ModelConfig(model=str(folder), max_model_len=128, **options))


def test_weights_of_other_linears_are_not_quantized(tmp_path: Path) -> None:
    """GPT-2's linears have a class of their own."""
    folder = make_model_folder(tmp_path)  # for its tokenizer
    saved(folder, "gpt2")
    with pytest.raises(ConfigError, match=r"has transformer\.h\.0\.attn\.c_attn\.weight"):
        load_model(ModelConfig(model=str(folder), quantization="int4", max_model_len=128))


def test_a_dropped_model_is_freed(tmp_path: Path) -> None:
    """transformers' table of attention functions does not keep it."""
    model = loaded(made(tmp_path, family="olmo2"))
    inner = weakref.ref(model._model)
    del model
    gc.collect()
    assert inner() is None
