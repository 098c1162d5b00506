"""The steps of a GPU on two ranks: Triton's kernels in its interpreter, sampling on the device, gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.generation import Reference, random_tokens

VOCAB_SIZE = 264
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2, "async_scheduling": True}, {"pipeline_parallel_size": 2}]
)
def test_steps_planned_ahead_on_the_device_give_the_tokens_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """In prompts by chunks and decodes, a token of the first rank reaches the other before it is needed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks: this process does not import Triton
    num_layers = options.get("pipeline_parallel_size", 1)  # the interpreter is slow
    folder = make_model_folder(
        tmp_path,
        "qwen3",
        hidden_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
    )
    reference, greedy = Reference(folder), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [random_tokens(length, seed=length, vocab_size=VOCAB_SIZE) for length in (9, 21)]
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=10,
        **options,
    ) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference.greedy(prompt, 4) for prompt in prompts
    ]
