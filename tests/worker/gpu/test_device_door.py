"""The whole engine with steps on the device, through ``LLM``, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.generation import Reference, random_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_tiles")]

REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=5, max_tokens=2, ignore_eos=True, top_k=30, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, seed=7, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
]
PROMPTS = [random_tokens(7 + i, seed=i) for i in range(len(REQUESTS))]


def outputs(folder: Path, ahead: bool) -> list[RequestOutput]:
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        async_scheduling=ahead,
        max_model_len=64,
        max_num_seqs=2,  # the last one joins while others run
        max_num_batched_tokens=8,
        num_gpu_blocks_override=24,
    ) as llm:
        return llm.generate(PROMPTS, REQUESTS, use_tqdm=False)


def test_every_feature_through_the_door(tmp_path: Path) -> None:
    """Greedy tokens are transformers' and the likeliest ones; a grammar is followed although its masks come
    late; seeded draws do not depend on a step under way."""
    folder = make_model_folder(tmp_path, "qwen3", num_layers=1, head_dim=24)  # the interpreter is slow
    plain, ahead = outputs(folder, ahead=False), outputs(folder, ahead=True)
    greedy, _, choice = (output.outputs[0] for output in ahead)
    assert greedy.token_ids == Reference(folder).greedy(PROMPTS[0], 2)
    assert greedy.logprobs is not None
    assert [entry.chosen.rank for entry in greedy.logprobs] == [1, 1]
    assert choice.text in ("yes", "no")
    assert [output.outputs[0].token_ids for output in ahead] == [
        output.outputs[0].token_ids for output in plain
    ]
