"""Greedy tokens of every family equal transformers' own ``generate``, whatever is drafted and rejected."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.core.request import Request
from engine.frontend.llm import LLM
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import MODEL_NAMES, TWO_TABLES, ModelFolders
from tests.worker.counted_drafts import DraftCounts
from tests.worker.generation import Reference, SmallEngine, random_tokens
from tests.worker.random_loads import POLICIES
from tests.worker.test_greedy_equality import SCARCE, greedy
from tests.worker.test_random_loads import draw_options

STATELESS = MODEL_NAMES
TIGHT = {
    **dict.fromkeys(("mistral-window", "mixtral-window"), 10),
    **dict.fromkeys((*TWO_TABLES, "llama4"), 26),
    "llama4-other-switches": 29,
}
"""Numbers of blocks that are too few for a test's requests, in one block table or several."""
NUM_PROMPTS = 7
COMMON = {"num_speculative_tokens": 5, "weigh_costs": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", **COMMON},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **COMMON},
}
FEW = list(range(60, 72))
"""Tokens that answers repeat often."""
NUM_SAID = 36
"""The length of a turn's answer."""
MAX_DRAFTS = 11
"""More than a block, and nearly a window, of the tests' models."""


class DraftedEngine(SmallEngine):
    """Drafts the known answer up to some place, and other tokens after it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.answers: dict[str, list[int]] = {}
        """The answer that each request will get."""
        self.num_drafts = self.num_accepted = 0
        self._random = Random(7)

    def step(self) -> None:
        drafts = {request.request_id: self._drafts(request) for request in self.scheduler.running}
        self.scheduler.update_draft_token_ids(drafts, 0.0)
        super().step()
        stats = self.scheduler.make_stats().spec_decoding
        if stats is not None:
            self.num_drafts += stats.num_draft_tokens
            self.num_accepted += stats.num_accepted_tokens

    def _drafts(self, request: Request) -> list[int]:
        """Right drafts up to a place, a wrong one there, and right or wrong ones after it."""
        said = self.answers[request.request_id][request.num_output_tokens :]
        drafts = said[: self._random.randint(0, MAX_DRAFTS)]
        if drafts and self._random.random() < 0.6:
            drafts[self._random.randrange(len(drafts))] ^= 1
        return drafts + random_tokens(self._random.choice((0, 0, 2)), seed=self._random.randrange(100))


@pytest.mark.slow
@pytest.mark.parametrize("name", STATELESS)
def test_drafts_change_no_token(name: str, model_folders: ModelFolders) -> None:
    """With chunked prompts, prefix hits, preemption and moving windows they are transformers'; a next turn
    that hits the blocks of a drafted answer continues as without drafts."""
    folder = model_folders(name)
    reference = Reference(folder)
    engine = DraftedEngine(
        folder, num_blocks=TIGHT.get(name, 14), max_num_batched_tokens=24, max_model_len=92
    )
    shared = random_tokens(27, seed=1)
    for index in range(NUM_PROMPTS):
        prompt = shared[: 9 * (index % 4)] + random_tokens(7 + 5 * index, seed=10 + index)
        ask(engine, f"r{index}", prompt, reference.greedy(prompt, 30 + index), greedy(30 + index))
        if index % 3 == 1:
            engine.step()
    assert engine.run() == engine.answers
    assert engine.num_preemptions > 0
    assert engine.num_accepted > NUM_PROMPTS
    assert engine.num_drafts - engine.num_accepted > NUM_PROMPTS

    first = random_tokens(30, seed=3)
    ask(engine, "first", first, reference.greedy(first, 16), greedy(16))
    second = first + engine.run()["first"] + random_tokens(9, seed=4)
    ask(engine, "second", second, reference.greedy(second, 16), greedy(16))
    assert engine.run() == engine.answers
    assert engine.requests["second"].num_cached_tokens == 40, "all full blocks of verified tokens"


def ask(
    engine: DraftedEngine, request_id: str, prompt: list[int], answer: list[int], params: SamplingParams
) -> None:
    engine.answers[request_id] = answer
    engine.add(request_id, prompt, params)


def turns(random: Random) -> list[list[int]]:
    """Prompts that begin alike and repeat themselves, each with different changes."""
    shared, text = tokens_of(random, 25), tokens_of(random, 9)
    prompts = []
    for _ in range(6):
        said = text * random.randint(1, 5)
        for _ in range(random.randint(0, 2)):
            said[random.randrange(len(said))] = random.choice(FEW)
        prompts.append(shared[: random.choice((0, 8, 16, 25))] + said)
    return prompts


def tokens_of(random: Random, count: int) -> list[int]:
    return random.choices(FEW, k=count)


def said_of_few() -> SamplingParams:
    """Greedy parameters with tokens that often repeat; the penalty ends loops, and so makes drafts wrong."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=NUM_SAID,
        ignore_eos=True,
        allowed_token_ids=FEW,
        frequency_penalty=0.02,
    )


def conversations(folder: Path, random: Random, **options: Any) -> list[list[int]]:
    """Answers in two turns of some jobs; the second prompt has the first one's answer."""
    params, prompts = said_of_few(), turns(random)
    with LLM(str(folder), multiprocess=False, dtype="float32", **options) as llm:
        jobs = [JobRef(f"job-{i}") for i in range(len(prompts))]
        first = [
            list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False, jobs=jobs)
        ]
        again = [[*prompt, *said, *tokens_of(random, 3)] for prompt, said in zip(prompts, first, strict=True)]
        second = [
            list(o.outputs[0].token_ids) for o in llm.generate(again, params, use_tqdm=False, jobs=jobs)
        ]
        llm.engine.check_invariants()
    return first + second


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("name", STATELESS)
def test_nor_do_those_of_drafters(
    name: str, method: str, model_folders: ModelFolders, tmp_path: Path
) -> None:
    """Two turns of some jobs run with random settings: tiers, async scheduling, and few blocks or many."""
    seed = f"{name} {method}"
    plain = conversations(model_folders(name), Random(seed), max_model_len=160, num_gpu_blocks_override=400)
    random, counts = Random(seed[::-1]), DraftCounts()
    block_size = random.choice((4, 8, 16))
    options = draw_options(random, block_size, 159, tmp_path, num_groups=3 if name in SCARCE else 1)
    options["speculative_config"] = DRAFTERS[method]
    policy = POLICIES[random.choice(sorted(POLICIES))]()
    drafted = conversations(
        model_folders(name), Random(seed), scheduling_policy=policy, executor_factory=counts, **options
    )
    assert drafted == plain, options
    assert counts.num_drafts > counts.num_accepted
    assert counts.num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "gemma3", "gpt-oss"])
def test_nor_do_they_through_transformers(name: str, model_folders: ModelFolders) -> None:
    """The same holds for models that transformers' own code serves."""
    folder = model_folders(name)
    prompt = random_tokens(50, seed=5)
    answer = Reference(folder).greedy(prompt, 24)
    engine = DraftedEngine(folder, model_impl="transformers", max_num_batched_tokens=16)
    ask(engine, "r", prompt, answer, greedy(24))
    assert engine.run()["r"] == answer
    assert engine.num_accepted > 0
