"""Greedy tokens equal transformers' own ``generate``, whatever the scheduler does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import MODEL_NAMES, TWO_TABLES, WITH_STATES, ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens

SCARCE = {
    "mistral-window": (13, 16),
    "mixtral-window": (13, 16),
    "llama4": (26, 24),
    "llama4-other-switches": (34, 24),
    **dict.fromkeys(TWO_TABLES, (32, 24)),
}
"""Numbers of blocks that are too few for a test's requests, and token budgets that lead to preemption: with a
window fewer blocks are needed, with two block tables more."""
PROMPT_LENGTHS = (1, 5, 8, 17, 43, 64)


@pytest.fixture(params=MODEL_NAMES)
def folder(request: pytest.FixtureRequest, model_folders: ModelFolders) -> Path:
    return model_folders(request.param)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.slow
def test_one_request_alone(folder: Path) -> None:
    """A request alone in the engine gets the tokens of transformers."""
    engine, reference = SmallEngine(folder), Reference(folder)
    for length in PROMPT_LENGTHS:
        prompt = random_tokens(length, seed=length)
        assert engine.generate(prompt) == reference.greedy(prompt, 24)


@pytest.mark.slow
def test_mixed_batch_with_chunks_hits_preemption_and_resumption(folder: Path) -> None:
    """Chunked prompts, shared prefixes and a pool too small for all change no token of any request."""
    num_blocks, budget = SCARCE.get(folder.name, (24, 24))
    engine = SmallEngine(
        folder,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        num_state_slots=24 if folder.name in WITH_STATES else None,
    )
    reference = Reference(folder)
    shared = random_tokens(27, seed=1)
    prompts = {f"r{i}": shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(7)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        engine.add(request_id, prompt, greedy(20 + index))
        engine.step()
    outputs = engine.run()

    assert engine.num_preemptions > 0
    assert engine.num_cached_tokens > 0
    assert engine.num_chunked_steps > 0
    for index, (request_id, prompt) in enumerate(prompts.items()):
        assert outputs[request_id] == reference.greedy(prompt, 20 + index), request_id


def test_next_turn_hits_the_whole_previous_turn(folder: Path) -> None:
    """A turn that continues an earlier one reuses its blocks, output included, and gives the same tokens."""
    engine, reference = SmallEngine(folder), Reference(folder)
    first = random_tokens(30, seed=3)
    answer = engine.generate(first, greedy(16))
    second = first + answer + random_tokens(9, seed=4)
    assert engine.generate(second, greedy(16)) == reference.greedy(second, 16)
    # 45 tokens of the first turn were computed (its last one never was): 5 full blocks of 8.
    assert engine.num_cached_tokens == 40


@pytest.mark.slow
def test_native_and_transformers_agree(model_folders: ModelFolders) -> None:
    """The same folder served by our decoder and through transformers gives the same tokens."""
    prompt = random_tokens(50, seed=5)
    for name in ("llama", "mistral-window", "qwen2-window", "gemma2", "gemma3", "gpt-oss", "qwen3"):
        native = SmallEngine(model_folders(name), model_impl="native")
        other = SmallEngine(model_folders(name), model_impl="transformers", max_num_batched_tokens=16)
        assert native.generate(prompt) == other.generate(prompt)


def test_an_aborted_request_leaves_the_others_alone(model_folders: ModelFolders) -> None:
    """An abort in the middle changes nothing for the others, and its id can be used again."""
    folder = model_folders("qwen3")
    engine, reference = SmallEngine(folder, num_blocks=20, max_num_seqs=2), Reference(folder)
    prompts = [random_tokens(20, seed=20 + i) for i in range(3)]
    engine.add("stays", prompts[0])
    engine.add("goes", prompts[1])
    for _ in range(5):
        engine.step()
    engine.abort("goes")
    engine.add("goes", prompts[2])
    outputs = engine.run()
    assert outputs["stays"] == reference.greedy(prompts[0], 24)
    assert outputs["goes"] == reference.greedy(prompts[2], 24)
