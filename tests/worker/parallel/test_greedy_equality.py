"""Tokens of a model in two processes equal those of one, whatever the scheduler does meanwhile."""

from __future__ import annotations

import pytest

from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import TWO_TABLES, WITH_STATES, ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens
from tests.worker.parallel.ranks import two_ranks

pytestmark = pytest.mark.slow

MORE_BLOCKS = {**dict.fromkeys(TWO_TABLES, 30), "llama4": 26, "gemma4": 44, "mimo-v2-flash": 44}
"""Blocks of models with several block tables."""
SAMPLED = (
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=2, temperature=0.7, top_p=0.8, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=3, top_k=20, repetition_penalty=1.3, logprobs=2, max_tokens=12, ignore_eos=True),
)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "qwen2-window",
        "gemma3",
        "qwen3-moe",
        "llama4",
        "mixtral",
        "glm4-moe",
        "gpt-oss",
        "deepseek-v3",
        "qwen3-next",
        "qwen3.5",
        "granite4",
        "arcee",
        "apertus",
        "cohere2",
        "minicpm3",
        "ministral3",
        "ernie4.5-moe",
        "mistral4",
        "gemma4",
        "gemma4-small",
        "bamba",
        "kimi-linear",
        "olmo-hybrid",
        "falcon-h1",
        "falcon-h1-norms",
        "jamba",
        "mimo-v2-flash",
        "deepseek-v3.2",
        "glm-5",
        "seed-oss",
        "smollm3",
        "qwen2-moe",
        "granite3-moe",
        "dots1",
        "glm4-moe-lite",
        "minimax-m2",
        "olmo3",
        "exaone4",
        "ernie4.5",
        "glm4",
        "phi3",
        "hy-v3",
        "exaone-moe",
        "mellum",
        "youtu",
        "nemotron-h",
        "nemotron-h-dense",
        "nemotron-h-latents",
        "lfm2",
        "lfm2-moe",
        "lfm3",
        "gpt_neox",
        "phi",
        "olmo2",
    ],
)
def test_two_ranks_give_the_tokens_of_one_process(name: str, model_folders: ModelFolders) -> None:
    """With prompts longer than the budget, prefix hits and preemption, greedy tokens are transformers', and
    sampled ones those of a single process. Models have one key-value head for both ranks, biases everywhere,
    a tied head, QK norms, two block tables, Gemma's norms, halves of experts, sinks and biases of experts,
    latents that both ranks have, states, or the code of transformers."""
    folder = model_folders(name)
    shared = random_tokens(27, seed=1)
    prompts = [shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(6)]
    reference, single = Reference(folder), SmallEngine(folder)
    num_blocks = MORE_BLOCKS.get(name, 22)
    slots = 24 if name in WITH_STATES else None
    with two_ranks(folder, num_blocks=num_blocks, max_num_batched_tokens=24, num_state_slots=slots) as engine:
        for index, prompt in enumerate(prompts):
            greedy = SamplingParams(temperature=0.0, max_tokens=20 + index, ignore_eos=True)
            engine.add(f"r{index}", prompt, greedy)
            engine.step()
        outputs = engine.run()
        assert engine.num_preemptions > 0
        assert engine.num_cached_tokens > 0
        assert engine.num_chunked_steps > 0
        for index, prompt in enumerate(prompts):
            assert outputs[f"r{index}"] == reference.greedy(prompt, 20 + index)
        for params in SAMPLED:
            assert engine.generate(shared, params) == single.generate(shared, params)
    (ours,), (theirs,) = engine.logprobs.values(), single.logprobs.values()
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    assert ours[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3-moe",
        "glm4-moe-groups",
        "gpt-oss",
        "llama4-other-switches",
        "granite4",
        "minimax-m2",
        "glm4-moe-lite",
        "nemotron-h",
    ],
)
def test_experts_by_rank_give_the_tokens_of_transformers(name: str, model_folders: ModelFolders) -> None:
    """Each rank has half of the experts, whole: for prompts in one step and in chunks, with a shared expert
    and routers by group."""
    folder = model_folders(name)
    reference, prompts = Reference(folder), [random_tokens(length, seed=length) for length in (1, 9, 60)]
    with two_ranks(folder, max_num_batched_tokens=24, enable_expert_parallel=True) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt)
        outputs = engine.run()
    for index, prompt in enumerate(prompts):
        assert outputs[f"r{index}"] == reference.greedy(prompt, 24)
