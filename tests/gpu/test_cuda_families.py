"""Every native family on a GPU gives transformers' tokens, whatever the scheduler does."""

from __future__ import annotations

import gc
from inspect import signature
from random import Random
from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import MODEL_NAMES, WITH_STATES, ModelFolders
from tests.worker.generation import Reference, SmallEngine, random_tokens
from tests.worker.random_loads import POLICIES, LoadDrawer, Oracle, wrong_answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
_NORMS_HAVE_GROUPS = "group_size" in signature(GraniteMoeHybridRMSNormGated).parameters
LOADED = ("qwen3", "qwen2-window", "qwen3-moe", "gpt-oss", "gemma3", "deepseek-v3", "qwen3-next", "granite4")


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_greedy_tokens_equal_transformers(name: str, model_folders: ModelFolders) -> None:
    """Fp32 tokens equal transformers' with chunks beside decodes, prefix hits, and graphs."""
    if name == "granite4-dense" and not _NORMS_HAVE_GROUPS:
        pytest.skip("before 5.18, transformers normalized the groups of Granite's Mamba layers as one")
    folder = model_folders(name)
    engine = SmallEngine(
        folder,
        num_blocks=80,
        max_num_batched_tokens=24,
        num_state_slots=24 if name in WITH_STATES else None,
        device="cuda",
    )
    reference = Reference(folder, device="cuda")
    shared = random_tokens(27, seed=1)
    prompts = {f"r{i}": shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(6)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        greedy = SamplingParams(temperature=0.0, max_tokens=12 + index, ignore_eos=True)
        engine.add(request_id, prompt, greedy)
        engine.step()
    outputs = engine.run()
    assert engine.num_chunked_steps > 0
    for index, (request_id, prompt) in enumerate(prompts.items()):
        assert outputs[request_id] == reference.greedy(prompt, 12 + index), request_id


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("tier", ["none", "host"])
def test_answers_under_a_random_load(name: str, tier: str, model_folders: ModelFolders) -> None:
    """Through ``LLM`` with async scheduling and a scarce pool, each answer is that of its prompt alone."""
    random = Random(f"{name} {tier}")
    folder, block_size = model_folders(name), 16
    oracle = Oracle(folder, dtype="float32", device="cuda")
    load = LoadDrawer(random, oracle, block_size, (60, 190)).draw(24)
    num_blocks = 6 * (-(-load.longest // block_size) + 2)
    options: dict[str, Any] = {"num_state_slots": 24} if name in WITH_STATES else {}
    if tier == "host":
        options["num_host_blocks_override"] = 2 * num_blocks
    with LLM(
        str(folder),
        scheduling_policy=POLICIES[random.choice(sorted(POLICIES))](),
        multiprocess=False,
        dtype="float32",
        device="cuda",
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_model_len=load.longest + 1,
        max_num_batched_tokens=random.choice((2 * block_size + 1, 64, 256)),
        max_num_seqs=random.choice((3, 8, 32)),
        **options,
    ) as llm:
        assert wrong_answers(llm, load, oracle) == []
        llm.engine.check_invariants()
    oracle.close()


def test_a_closed_engine_gives_its_memory_back(model_folders: ModelFolders) -> None:
    """The pool, the weights and the graphs of an engine are freed when it is closed."""
    reserved = []
    for _ in range(2):
        with LLM(str(model_folders("qwen3")), multiprocess=False, device="cuda", max_model_len=256) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= reserved[0] + 2**26
