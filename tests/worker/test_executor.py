"""The executor as the engine core uses it: its description of itself, and equal tokens under pressure."""

from __future__ import annotations

import pickle

import pytest

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.core.outputs import CachedRequestData, SchedulerOutput
from engine.errors import ConfigError, ModelLoadError
from engine.records.sampling_params import SamplingParams
from engine.worker.executor import UniProcExecutor
from tests.worker.conftest import ModelFolders
from tests.worker.generation import SmallEngine, random_tokens

PRESSED = (
    SamplingParams(seed=1, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=2, temperature=0.7, top_p=0.8, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=3, top_k=20, repetition_penalty=1.3, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=4, presence_penalty=1.5, frequency_penalty=0.5, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, replay_token_ids=list(range(100, 125)), max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=30, ignore_eos=True),
)


def test_preemption_changes_no_sampled_token(model_folders: ModelFolders) -> None:
    """Seeded, penalized and replayed requests give the same tokens preempted as they give alone."""
    folder = model_folders("qwen3")
    prompts = [random_tokens(15 + i, seed=i) for i in range(len(PRESSED))]
    alone = SmallEngine(folder)
    expected = [alone.generate(prompt, p) for prompt, p in zip(prompts, PRESSED, strict=True)]

    engine = SmallEngine(folder, num_blocks=20, max_num_batched_tokens=32)
    for i, (prompt, params) in enumerate(zip(prompts, PRESSED, strict=True)):
        engine.add(f"r{i}", prompt, params)
    outputs = engine.run()
    assert engine.num_preemptions > 0
    assert [outputs[f"r{i}"] for i in range(len(PRESSED))] == expected
    assert expected[4][:25] == list(range(100, 125))
    assert [entry.token_ids[0] for entry in engine.logprobs["r5"]] == expected[5]


@pytest.mark.slow
def test_info_describes_the_loaded_model(model_folders: ModelFolders) -> None:
    """The core gets blocks, length, vocabulary and type; the length is the model's own by default."""
    config = EngineConfig(
        model=ModelConfig(model=str(model_folders("qwen3")), dtype="bfloat16"),
        cache=CacheConfig(num_gpu_blocks_override=300),
    )
    info = UniProcExecutor(config).info
    assert (info.num_gpu_blocks, info.max_model_len) == (300, 4096)
    assert (info.vocab_size, info.dtype) == (512, "bfloat16")


def test_the_class_is_a_picklable_factory() -> None:
    """The executor's class crosses a process boundary as its own factory."""
    assert pickle.loads(pickle.dumps(UniProcExecutor)) is UniProcExecutor


def test_an_empty_plan_is_a_step_too(model_folders: ModelFolders) -> None:
    """A plan that only names finished requests runs nothing and samples nothing."""
    engine = SmallEngine(model_folders("llama"))
    engine.add("a", random_tokens(5, seed=1))
    engine.step()
    engine.abort("a")
    plan = SchedulerOutput([], CachedRequestData(), {}, 0, {"a", "never-seen"}, set())
    assert engine.executor.submit(plan).result().req_ids == []


def kv_config(folder: object, cache: CacheConfig, max_model_len: int | None = 256) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(folder), max_model_len=max_model_len), cache=cache)


def test_kv_memory_in_bytes_sets_the_number_of_blocks(model_folders: ModelFolders) -> None:
    """``kv_cache_memory_bytes`` holds as many blocks as fit; the override wins."""
    folder = model_folders("qwen2")
    # 2 layers x (K, V) x 2 heads x 16 dims x 4 bytes x 16 tokens
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 16
    cache = CacheConfig(kv_cache_memory_bytes=40 * bytes_per_block + 1)
    assert UniProcExecutor(kv_config(folder, cache)).info.num_gpu_blocks == 40
    cache = CacheConfig(kv_cache_memory_bytes=1, num_gpu_blocks_override=17)
    assert UniProcExecutor(kv_config(folder, cache)).info.num_gpu_blocks == 17


def test_default_pool_holds_no_more_than_can_be_used(model_folders: ModelFolders) -> None:
    """On the host the default pool stops at ``max_num_seqs`` sequences of full length."""
    info = UniProcExecutor(kv_config(model_folders("qwen2"), CacheConfig())).info
    assert info.num_gpu_blocks == 128 * 256 // 16 + 1


def test_pool_too_small_for_one_sequence_says_what_would_fit(model_folders: ModelFolders) -> None:
    """A pool below one longest sequence is refused with the length that it could hold."""
    config = kv_config(model_folders("qwen2"), CacheConfig(num_gpu_blocks_override=10))
    with pytest.raises(
        ModelLoadError, match=r"maximum context length of 256 .* max_model_len to at most 144 "
    ):
        UniProcExecutor(config)


def test_pool_beyond_memory_names_both_sizes(model_folders: ModelFolders) -> None:
    """A pool larger than the memory is refused before it is touched, naming needed and available bytes."""
    config = kv_config(model_folders("qwen2"), CacheConfig(kv_cache_memory_bytes=2**50))
    with pytest.raises(ModelLoadError, match=rf"needs .*\({2**50} bytes\).* only .*bytes\) are available"):
        UniProcExecutor(config)


def test_length_beyond_the_model_names_its_limit(model_folders: ModelFolders) -> None:
    """``max_model_len`` above the model's limit is a configuration error."""
    config = kv_config(model_folders("qwen2"), CacheConfig(), max_model_len=4097)
    with pytest.raises(ConfigError, match="maximum context length is 4096"):
        UniProcExecutor(config)
