"""Log-probabilities of prompts in the steps of a GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import ModelFolders
from tests.worker.generation import random_tokens
from tests.worker.test_prompt_logprobs import check


@pytest.mark.slow
@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_they_are_those_of_transformers(name: str, model_folders: ModelFolders) -> None:
    """Log-probabilities are transformers' with fused ops and without, in chunks, next to another request."""
    folder = model_folders(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    told = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    params = [told, told, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)]
    prompts = [random_tokens(21, seed=1), random_tokens(1, seed=2), random_tokens(4, seed=3)]
    sizes: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 64, "num_gpu_blocks_override": 20}
    with LLM(str(folder), multiprocess=False, device="cpu", attention_backend="triton", **sizes) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs[:2]:
            check(model, output)
        assert outputs[2].prompt_logprobs is None
        (alone,) = llm.generate([prompts[2]], params[2], use_tqdm=False)
        assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids
