"""Models whose layers differ in their heads, on Triton's kernels in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_tokens_are_those_of_transformers(name: str, model_folders: ModelFolders) -> None:
    """Each kind of layer has its own view of the pool; the second turn hits what the first has written."""
    folder = model_folders(name)
    reference = Reference(folder)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [random_tokens(33, seed=1), random_tokens(2, seed=2)]
    options: dict[str, Any] = {
        "multiprocess": False,
        "device": "cpu",
        "max_model_len": 128,
        "num_gpu_blocks_override": 40,
    }
    with LLM(str(folder), attention_backend="triton", **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == reference.greedy(prompt, 3)
            prompts = [prompts[0] + [*outputs[0].outputs[0].token_ids, 7]]
