"""Drafts through ``LLM`` with a GPU's steps, in Triton's interpreter: on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.conftest import ModelFolders
from tests.worker.counted_drafts import DraftCounts
from tests.worker.generation import Reference, random_tokens

pytestmark = pytest.mark.usefixtures("wide_tiles")
NUM_TOKENS = 20
VOCAB_SIZE = 264
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 4, "weigh_costs": False}


def on_gpu_path(folder: Path, speculative: dict[str, Any], **options: Any) -> LLM:
    return LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=16,
        speculative_config=speculative,
        **options,
    )


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, because the interpreter is slow."""
    return make_model_folder(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("async_scheduling", "num_ranks"), [(False, 1), pytest.param(True, 2, marks=pytest.mark.long)]
)
def test_what_was_said_before_is_drafted_and_verified(
    async_scheduling: bool, num_ranks: int, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt runs twice, and the second time its first answer is drafted. Greedy tokens are
    transformers' both times; with seeds, penalties and filters both answers are equal."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reference, counts = Reference(small_folder), DraftCounts()
    prompts = [random_tokens(length, seed=length, vocab_size=VOCAB_SIZE) for length in (9, 21)]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    seeded = SamplingParams(
        seed=3, top_k=40, presence_penalty=0.5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
    )
    options = {"tensor_parallel_size": num_ranks, "async_scheduling": async_scheduling}
    with on_gpu_path(small_folder, SUFFIX, executor_factory=counts, **options) as llm:
        for params in (greedy, seeded):
            accepted_before, told = counts.num_accepted, []
            for _ in range(2):
                outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
                told.append([output.token_ids for output in outputs])
            assert told[0] == told[1]
            assert counts.num_accepted - accepted_before > NUM_TOKENS // 2
            if params is greedy:
                assert told[0] == [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
            else:
                assert [len(output.logprobs or ()) for output in outputs] == [NUM_TOKENS] * 2
        llm.engine.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral-window", "gpt-oss", "deepseek-v3"])
def test_windows_sinks_and_latents_verify_drafts(name: str, model_folders: ModelFolders) -> None:
    """Models with other attention, also with two block tables, give transformers' tokens."""
    folder, counts = model_folders(name), DraftCounts()
    prompt, reference = random_tokens(20, seed=4), Reference(folder)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with on_gpu_path(folder, SUFFIX, executor_factory=counts) as llm:
        for _ in range(2):
            [output] = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == reference.greedy(prompt, 6)
    assert counts.num_accepted > 0


def test_drafters_with_weights_are_refused_by_name(model_folders: ModelFolders) -> None:
    """Drafters with weights, which a GPU does not support, are refused by their method."""
    with pytest.raises(ConfigError, match="method mtp drafts on CPUs only so far, not on a GPU"):
        on_gpu_path(model_folders("qwen3"), {"method": "mtp"})
