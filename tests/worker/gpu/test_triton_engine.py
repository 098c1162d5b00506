"""The engine on Triton's kernels, in their interpreter, and its errors where they cannot run."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.worker.attention import selection
from engine.worker.attention.selection import resolve_attention
from engine.worker.executor import UniProcExecutor
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_BLOCKS = 17
pytestmark = pytest.mark.usefixtures("wide_tiles")


def triton_llm(folder: Path, kv_cache_dtype: str = "auto", kv_cache_scale: float = 1.0) -> LLM:
    return LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        attention_backend="triton",
        max_model_len=128,
        num_gpu_blocks_override=NUM_BLOCKS,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_scale=kv_cache_scale,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen3", "mistral-window", "olmo2", "qwen3-moe", "glm4-moe", "apertus", "cohere2", "minicpm3", "arcee"],
)
def test_tokens_are_those_of_transformers(name: str, model_folders: ModelFolders) -> None:
    """Models on Triton's kernels choose transformers' tokens; the second turn hits the KV of the first."""
    folder = model_folders(name)
    reference = Reference(folder)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [random_tokens(33, seed=1), random_tokens(2, seed=2)]
    with triton_llm(folder) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == reference.greedy(prompt, 3)
            prompts = [prompts[0] + [*outputs[0].outputs[0].token_ids, 7]]


@pytest.mark.slow
def test_who_reads_what_the_same_step_computes(model_folders: ModelFolders) -> None:
    """Three equal prompts that end a token after a block, and one that continues it, run in one step; then
    one that hits their block."""
    folder, greedy = model_folders("qwen3"), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    reference, prompt = Reference(folder), random_tokens(17, seed=3)
    with triton_llm(folder) as llm:
        for prompts in ([prompt, prompt, prompt, prompt + [5] * 4], [[*prompt, 6]]):
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [
                reference.greedy(asked, 3) for asked in prompts
            ]


@pytest.mark.slow
def test_kv_of_8_bits_changes_little(model_folders: ModelFolders) -> None:
    """With K and V in 8 bits, the next tokens are about as likely to the model."""
    folder, prompt = model_folders("qwen3"), random_tokens(40, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    likely = []
    for stored_as in (("auto", 1.0), ("fp8_e4m3", 0.5)):
        with triton_llm(folder, *stored_as) as llm:
            [output] = llm.generate([prompt], params, use_tqdm=False)
        likely.append(output.outputs[0].cumulative_logprob)
    full, narrow = likely
    assert full is not None
    assert narrow is not None
    assert 0 < abs(full - narrow) < 0.2


def test_kv_of_8_bits_takes_a_quarter_of_32(model_folders: ModelFolders) -> None:
    """The same memory holds four times the blocks of fp32."""
    wide = config(model_folders("qwen3"), cache=CacheConfig(kv_cache_memory_bytes=2**20))
    narrow = replace(wide, cache=replace(wide.cache, kv_cache_dtype="fp8_e4m3"))
    counts = []
    for each in (wide, narrow):
        executor = UniProcExecutor(each)
        counts.append(executor.info.num_gpu_blocks)
        executor.shutdown()
    assert counts[1] // 4 == counts[0]


def config(
    folder: Path | str = "", backend: str = "triton", cache: CacheConfig | None = None
) -> EngineConfig:
    model = ModelConfig(model=str(folder), device="cpu", attention_backend=backend, max_model_len=64)
    return EngineConfig(model=model, cache=cache or CacheConfig())


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for GPUs run on a CPU only if that was requested twice."""
    assert resolve_attention(config(), CPU) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"attention_backend=triton on cpu .* TRITON_INTERPRET=1"):
        resolve_attention(config(), CPU)


def test_a_gpu_takes_triton_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without Triton, torch attends and a log line says why; if Triton was requested, that is an error."""
    assert resolve_attention(config(backend="auto"), CUDA) == "triton"
    assert resolve_attention(config(backend="torch"), CUDA) == "torch"
    assert resolve_attention(config(backend="auto"), CPU) == "auto"
    hide_triton(monkeypatch)
    with caplog.at_level(logging.WARNING, selection.__name__):
        assert resolve_attention(config(backend="auto"), CUDA) == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "Using torch attention; for Triton: pip install 'continuum-engine[gpu]'."
    ]
    with pytest.raises(ConfigError, match="attention_backend=triton needs Triton: pip install"):
        resolve_attention(config(), CUDA)


def hide_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(selection, "find_spec", find_spec)


def test_only_triton_stores_8_bits() -> None:
    """Another backend, which would ignore kv_cache_dtype, refuses it."""
    narrow = CacheConfig(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8_e4m3 needs attention_backend triton"):
        resolve_attention(config(backend="torch", cache=narrow), CUDA)
    assert resolve_attention(config(cache=narrow), CPU) == "triton"


def test_options_that_mean_nothing_are_refused() -> None:
    """An unknown type, and a scale that is no number or cannot divide, are refused."""
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8_e4m3, got 'int3'"):
        CacheConfig(kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match="kv_cache_scale must be a positive number, got 0"):
        CacheConfig(kv_cache_dtype="fp8_e4m3", kv_cache_scale=0)
    with pytest.raises(ConfigError, match="kv_cache_scale needs kv_cache_dtype fp8_e4m3"):
        CacheConfig(kv_cache_scale=0.5)
