"""The host tier under a real model: KV that was offloaded and loaded back gives the same tokens, and its size
is checked at start-up."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.executor import UniProcExecutor
from tests.api.server import running_server
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16
"""Bytes of a block of qwen2: layers x (K, V) x heads x dims x bytes x tokens."""


def ask(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The answers, and the total of cached prompt tokens."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], sum(o.num_cached_tokens for o in outputs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "deepseek-v3"])
def test_turns_loaded_from_the_host_give_the_same_tokens(model_folders: ModelFolders, name: str) -> None:
    """Of three jobs in a pool for little more than one, every later turn is loaded from the host, and has
    transformers' tokens."""
    folder = model_folders(name)
    reference = Reference(folder)
    histories = [random_tokens(150 + 10 * job, seed=job) for job in range(3)]
    with LLM(
        str(folder),
        multiprocess=False,
        max_model_len=304,
        num_gpu_blocks_override=20,
        num_host_blocks_override=100,
        max_num_batched_tokens=64,
    ) as llm:
        for turn in range(3):
            answers, num_cached = ask(llm, histories)
            assert answers == [reference.greedy(history, 12) for history in histories]
            # All full blocks of the previous turn, whose last token's KV was never computed.
            known = [(len(h) - 12 - 1) // 16 * 16 for h in histories] if turn else []
            assert num_cached >= sum(known)
            more = random_tokens(12, seed=100 + turn)
            histories = [h + answer + more for h, answer in zip(histories, answers, strict=True)]
        statistics = llm.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks == 19
        assert statistics.num_used_host_blocks > 3 * 10


@pytest.mark.slow
def test_a_returning_turn_says_over_http_what_came_back(model_folders: ModelFolders) -> None:
    """After other requests took its blocks, a turn's usage still counts its history as cached, and the
    metrics count it as loaded from the host."""
    flags = ("--num-gpu-blocks-override", "33", "--max-model-len", "512", "--kv-offloading-size", "0.01")
    with (
        running_server(model_folders("qwen2"), *flags, "--scheduling-policy", "fcfs") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def cached_tokens(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return cached

        history = random_tokens(320, seed=1)
        assert cached_tokens(history) == 0
        assert cached_tokens(random_tokens(500, seed=2)) == 0
        assert cached_tokens([*history, 5, 6, 7]) == 320
        metrics = http.get("/metrics").text.splitlines()
        loaded = [line for line in metrics if line.startswith("continuum:host_kv_loaded_tokens_total")]
        assert [float(line.split()[-1]) for line in loaded] == [320.0]
        assert server.interrupt() == 0


def executor(folder: Path, cache: CacheConfig) -> UniProcExecutor:
    return UniProcExecutor(EngineConfig(model=ModelConfig(model=str(folder), max_model_len=256), cache=cache))


def test_the_size_in_gib_buys_whole_blocks(model_folders: ModelFolders) -> None:
    """``kv_offloading_size`` is in GiB; the override wins; without either there is no tier."""
    folder = model_folders("qwen2")
    for cache, expected in (
        (CacheConfig(num_gpu_blocks_override=40), 0),
        (CacheConfig(num_gpu_blocks_override=40, kv_offloading_size=7.5 * BYTES_PER_BLOCK / 2**30), 7),
        (CacheConfig(num_gpu_blocks_override=40, kv_offloading_size=1, num_host_blocks_override=9), 9),
    ):
        assert executor(folder, cache).info.num_host_blocks == expected


def test_a_tier_beyond_the_host_is_refused(model_folders: ModelFolders) -> None:
    """A size beyond the host's memory is refused before it is touched, naming both sizes."""
    cache = CacheConfig(num_gpu_blocks_override=40, kv_offloading_size=2.0**20)
    with pytest.raises(ModelLoadError, match=r"host tier of \d+ KV blocks needs .* but only .* available"):
        executor(model_folders("qwen2"), cache)


def test_a_tier_without_room_for_a_block_is_refused(model_folders: ModelFolders) -> None:
    """A size below one block is refused with the size of a block."""
    cache = CacheConfig(num_gpu_blocks_override=40, kv_offloading_size=1e-9)
    with pytest.raises(ConfigError, match=rf"is less than one KV block of {BYTES_PER_BLOCK} bytes"):
        executor(model_folders("qwen2"), cache)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "kv_offloading_size needs prefix"),
        ({"num_host_blocks_override": 5, "enable_prefix_caching": False}, "num_host_blocks_override needs"),
        ({"kv_offloading_size": 0.0}, "positive number of GiB, got 0.0"),
        ({"num_host_blocks_override": 0}, "num_host_blocks_override must be at least 1"),
    ],
)
def test_a_tier_that_cannot_work_is_refused(options: dict[str, float], sentence: str) -> None:
    """Contradicting options are refused in one sentence that names the option."""
    with pytest.raises(ConfigError, match=sentence):
        CacheConfig(**options)  # type: ignore[arg-type]
