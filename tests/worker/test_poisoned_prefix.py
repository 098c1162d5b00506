"""KV of a request whose logits were NaN is never found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from continuum.cli.main import main
from engine.frontend.llm import LLM
from engine.records.row_failures import NOT_NUMBERS
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.broken_models import with_poisoned_token
from tests.worker.generation import random_tokens

POISON = 499
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TIERS: dict[str, dict[str, Any]] = {
    "the pool": {},
    "torch": {"attention_backend": "torch"},
    "steps in one call": {"dtype": "bfloat16"},
    "planned ahead": {"async_scheduling": True},
    "host memory": {"num_host_blocks_override": 40, "num_gpu_blocks_override": 12},
    "a disk": {"num_host_blocks_override": 4, "num_gpu_blocks_override": 12, "num_disk_blocks_override": 90},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    sound = make_model_folder(path / "sound", "qwen3", hidden_size=128, num_heads=4)
    return with_poisoned_token(sound, path / "poisoned", POISON)


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model that frees the blocks of its windows while it runs."""
    path = tmp_path_factory.mktemp("models")
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    sound = make_model_folder(
        path / "sound", "qwen2", hidden_size=128, num_layers=3, num_heads=4, extra_config=window
    )
    return with_poisoned_token(sound, path / "poisoned", POISON)


@pytest.mark.parametrize("where", ["the pool", "torch", "steps in one call", "planned ahead"])
def test_nobody_reads_it_in_a_block_that_a_window_left(where: str, windowed_folder: Path) -> None:
    """Requests that run with a poisoned one, and after it, get the same answers as alone, with a pool so
    small that blocks that windows have left are reused."""
    prompts = [random_tokens(90 + 9 * i, seed=30 + i, vocab_size=400) for i in range(4)]
    poisoned = [
        *random_tokens(100, seed=4, vocab_size=400),
        POISON,
        *random_tokens(40, seed=5, vocab_size=400),
    ]
    options = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 40} | TIERS[where]
    with LLM(str(windowed_folder), multiprocess=False, max_model_len=160, **options) as llm:

        def ask(*prompts: list[int]) -> list[list[int]]:
            outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
            llm.engine.check_invariants()
            return [list(output.outputs[0].token_ids) for output in outputs]

        alone = [ask(prompt)[0] for prompt in prompts]
        assert llm.reset_prefix_cache()
        together = ask(poisoned, *prompts[:2], poisoned, *prompts[2:])
        assert together == [[], *alone[:2], [], *alone[2:]]
        assert ask(*prompts) == alone


@pytest.mark.parametrize("where", TIERS)
def test_nobody_finds_what_it_computed(where: str, folder: Path, tmp_path: Path) -> None:
    """A prompt with another end gets its own answer, although the tokens before the poison were computed with
    it, or were found and computed with it by another request; wherever their copies are."""
    options = dict(TIERS[where])
    if "num_disk_blocks_override" in options:
        options |= {"kv_offloading_disk_path": str(tmp_path), "kv_offloading_disk_min_tokens": 1}
    prefix, others = random_tokens(124, seed=1, vocab_size=400), random_tokens(140, seed=2, vocab_size=400)
    with LLM(
        str(folder), multiprocess=False, max_model_len=160, **{"num_gpu_blocks_override": 40} | options
    ) as llm:

        def ask(*prompts: list[int]) -> list[tuple[list[int], int | str | None]]:
            outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
            llm.engine.check_invariants()
            return [(output.outputs[0].token_ids, output.outputs[0].stop_reason) for output in outputs]

        sound = ask([*prefix, 9])
        assert llm.reset_prefix_cache()
        for tokens in ([], [5] * 20):
            assert ask([*prefix, POISON, *tokens]) == [([], NOT_NUMBERS)]
            ask(others)  # their KV displaces the prefix from a small pool
            assert ask([*prefix, 9]) == sound


def test_a_replay_forgets_it_too(folder: Path, tmp_path: Path) -> None:
    """The replay makes the same decisions, prefix hits among them."""
    trace, prefix = tmp_path / "trace.jsonl", random_tokens(64, seed=3, vocab_size=400)
    with LLM(str(folder), multiprocess=False, num_gpu_blocks_override=300, trace_path=str(trace)) as llm:
        cached = [
            llm.generate([[*prefix, *end]], GREEDY, use_tqdm=False)[0].num_cached_tokens
            for end in ([7], [POISON, 8], [9], [10])
        ]
    assert cached == [0, 64, 0, 64]
    assert main(["trace", "replay", str(trace)]) == 0
    assert main(["trace", "validate", str(trace)]) == 0
