"""Log-probabilities of prompts are transformers', however the prompt is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.generation import random_tokens

PROMPTS = [random_tokens(length, seed=length) for length in (1, 5, 70, 33, 2, 64)]
TOLD = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "told", dtype="float32")


def check(model: Any, output: RequestOutput) -> None:
    told, prompt = output.prompt_logprobs, output.prompt_token_ids
    assert told is not None
    assert [told[0], len(told)] == [None, len(prompt)]
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for place, position in enumerate(told[1:], 1):
        assert position is not None
        row = wanted[place - 1]
        assert position.chosen.token_id == prompt[place]
        assert position.chosen.logprob == pytest.approx(row[prompt[place]].item(), abs=1e-3)
        assert abs(position.chosen.rank - int((row >= row[prompt[place]]).sum())) <= 2, "but for near ties"
        best = row.topk(2).values.tolist()
        assert [token.logprob for token in position.top] == pytest.approx(best, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, "tensor_parallel_size": 2},
        {"num_gpu_blocks_override": 9, "max_model_len": 128},
        {"speculative_config": {"method": "suffix"}},
    ],
    ids=["chunks", "two ranks", "short of blocks", "drafts"],
)
def test_they_are_those_of_transformers(folder: Path, options: dict[str, Any]) -> None:
    """They are right next to requests without them, and in a second run: nothing comes from the cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(folder, device="cpu", **{"num_gpu_blocks_override": 70, "max_model_len": 512, **options}) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [*PROMPTS, *PROMPTS], [*[TOLD] * len(PROMPTS), *[plain] * len(PROMPTS)], use_tqdm=False
            )
            for output in outputs[: len(PROMPTS)]:
                check(model, output)
                assert output.num_cached_tokens == 0
            assert all(output.prompt_logprobs is None for output in outputs[len(PROMPTS) :])
            assert [output.outputs[0].token_ids for output in outputs[: len(PROMPTS)]] == [
                output.outputs[0].token_ids[:3] for output in outputs[len(PROMPTS) :]
            ]


def test_too_many_are_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs must be in"):
        SamplingParams(prompt_logprobs=21).verify()
