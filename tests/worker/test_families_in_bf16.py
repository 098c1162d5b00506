"""Every native family computes in bf16, where linears are packed for a CPU, and with quantized linears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.conftest import VARIANTS
from tests.worker.generation import Reference, random_tokens

PROMPT = random_tokens(40, seed=3)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
NATIVE = [name for name in VARIANTS if name not in ("gpt_neox", "phi", "olmo2")]
NEAR = {None: 0.15, "int8": 0.6}
"""By how much a token's log-probability may differ from that in fp32, by quantization."""
WITH_CHOICES = 1.5
"""The same where a token may choose other experts, or attend to other tokens, by a rounding."""
CHOICES = (
    "moe",
    "mixtral",
    "gpt-oss",
    "llama4",
    "jamba",
    "deepseek",
    "glm-5",
    "mimo",
    "minimax",
    "mistral4",
    "dots1",
)
REJECTED = ("needs the compiled kernels", "not supported for experts without gates")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", NEAR)
@pytest.mark.parametrize("name", NATIVE)
def test_answers_are_as_probable(name: str, quantization: str | None, tmp_path: Path) -> None:
    """A family whose linears cannot be quantized here says so before it starts."""
    fields: dict[str, Any] = {**VARIANTS[name], "dtype": "bfloat16"}
    folder = make_model_folder(tmp_path / "model", **fields)
    options: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks_override": 150, "device": "cpu"}
    refused = ""
    try:
        with LLM(str(folder), multiprocess=False, quantization=quantization, **options) as llm:
            (output,) = llm.generate([PROMPT], LOGPROBS, use_tqdm=False)
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert quantization is not None
        assert any(reason in refused for reason in REJECTED), refused
        return
    answer = output.outputs[0]
    tokens = [*PROMPT, *answer.token_ids]
    with torch.inference_mode():
        exact = Reference(folder).model.float()(torch.tensor([tokens])).logits[0].float()
    wanted = exact[len(PROMPT) - 1 : -1].log_softmax(-1)
    near = WITH_CHOICES if any(each in name for each in CHOICES) else NEAR[quantization]
    for place, (token, told) in enumerate(zip(answer.token_ids, answer.logprobs or [], strict=True)):
        assert abs(told.chosen.logprob - float(wanted[place, token])) < near, (place, token)
