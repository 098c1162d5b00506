"""The worker on an accelerator keeps the CPU's promises, and a profile run sizes the KV pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.records.sampling_params import SamplingParams
from engine.worker.executor import UniProcExecutor
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.attention_reference import make_case, paged_output, reference_output
from tests.worker.generation import Reference, SmallEngine, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """In fp32 on cuda, chunks, hits and preemption change no token against transformers on cuda."""
    folder = make_model_folder(tmp_path / family, family)
    engine = SmallEngine(folder, num_blocks=24, max_num_batched_tokens=24, device="cuda")
    reference = Reference(folder, device="cuda")
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


def test_graphs_change_no_token(tmp_path: Path) -> None:
    """Requests that join one after the other get the same tokens with and without graphs."""
    folder = make_model_folder(tmp_path / "qwen3", "qwen3")
    prompts = {f"r{i}": random_tokens(6 + 7 * i, seed=i) for i in range(5)}
    outputs = []
    for enforce_eager in (False, True):
        engine = SmallEngine(folder, device="cuda", enforce_eager=enforce_eager)
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt)
            engine.step()
        outputs.append(engine.run())
    assert outputs[0] == outputs[1]


def test_a_prefix_that_decodes_share_changes_no_token(tmp_path: Path) -> None:
    """With cascade attention, eager or in graphs, fp32 tokens are transformers', also of another prefix."""
    folder = make_model_folder(tmp_path / "qwen3", "qwen3", max_position_embeddings=1024)
    shared = random_tokens(400, seed=1)
    prompts = {f"r{i}": shared + random_tokens(5 + i, seed=10 + i) for i in range(12)}
    prompts["other"] = random_tokens(30, seed=2)
    reference = Reference(folder, device="cuda")
    for enforce_eager in (False, True):
        engine = SmallEngine(
            folder,
            num_blocks=200,
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            device="cuda",
            enforce_eager=enforce_eager,
            disable_cascade_attn=False,
        )
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt, greedy(16))
            engine.step()
        outputs = engine.run()
        assert engine.num_cached_tokens > 0
        for request_id, prompt in prompts.items():
            assert outputs[request_id] == reference.greedy(prompt, 16), request_id


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_error_is_that_of_its_type(dtype: torch.dtype, window: int | None) -> None:
    """Paged attention on cuda is off the fp64 reference by no more than a few roundings of its type."""
    case = make_case(num_kv_heads=2, dtype=dtype, device="cuda")
    error = (paged_output(case, window) - reference_output(case, window)).abs().max()
    assert error < max(4 * torch.finfo(dtype).eps, 1e-5)


def test_bfloat16_runs_and_seeds_hold(tmp_path: Path) -> None:
    """A seeded bf16 request gives the same tokens twice on the same engine."""
    folder = make_model_folder(tmp_path / "qwen3", "qwen3", dtype="bfloat16")
    engine = SmallEngine(folder, device="cuda")
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=7, max_tokens=20, ignore_eos=True)
    prompt = random_tokens(30, seed=2)
    first = engine.generate(prompt, params)
    assert len(first) == 20
    assert engine.generate(prompt, params) == first


def test_pool_is_sized_by_a_profile_run(tmp_path: Path) -> None:
    """Without an override the pool takes its share of the device, and no more than can be used."""
    folder = make_model_folder(tmp_path / "qwen3", "qwen3")
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cuda", max_model_len=1024),
        cache=CacheConfig(gpu_memory_utilization=0.5),
    )
    executor = UniProcExecutor(config)
    free, total = torch.cuda.mem_get_info()
    assert executor.info.num_gpu_blocks == 128 * 1024 // 16 + 1
    assert free > 0.4 * total
    executor.shutdown()
