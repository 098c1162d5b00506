"""Warm-up runs include steps of every kind and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.worker.gpu import device_sampler
from engine.worker.gpu.backend import GPUBackend
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.triton_sampling import TritonSamplingOps
from engine.worker.gpu.warm_up import run_warm_up, warm_up_steps
from engine.worker.loading.loader import load_model
from engine.worker.parallel.group import ALONE
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.gpu.device_engine import GREEDY, DeviceEngine, spec_of


@pytest.mark.parametrize("max_num_seqs", [1, 5, 700])
@pytest.mark.parametrize("budget", [1, 16, 512, 100_000])
@pytest.mark.parametrize("verified_len", [1, 17])
def test_steps_are_ones_that_may_come(verified_len: int, max_num_seqs: int, budget: int) -> None:
    """Each step is within the limits; they include the largest prompts, the most decodes, the longest
    context, and with drafts the longest verifications and the most."""
    limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    steps = list(warm_up_steps(limits, 4000, verified_len))
    for step in steps:
        assert 1 <= len(step.query_lens) == len(step.seq_lens) <= max_num_seqs
        assert sum(step.query_lens) <= budget
        lengths = list(zip(step.query_lens, step.seq_lens, strict=True))
        assert all(1 <= query_len <= seq_len <= 4000 for query_len, seq_len in lengths)
        uniform_first = sorted(step.query_lens, key=lambda length: length != step.uniform_len)
        assert uniform_first == step.query_lens
    assert max(len(step.query_lens) for step in steps) == min(max_num_seqs, budget)
    assert max(max(step.seq_lens) for step in steps) == 4000
    whole = min(budget, 4000) * min(max_num_seqs, budget // min(budget, 4000))
    assert max(sum(step.query_lens) for step in steps) == whole
    longest = min(verified_len, budget)
    assert max(step.uniform_len for step in steps) == longest
    verified = [len(step.query_lens) for step in steps if step.uniform_len == longest > 1]
    assert set(verified) == ({1, min(max_num_seqs, budget // longest)} if longest > 1 else set())


@pytest.mark.parametrize("graph_sizes", [GraphSizes(()), GraphSizes((1, 4))])
def test_warm_up_runs_leave_nothing_behind(graph_sizes: GraphSizes, model_folders: ModelFolders) -> None:
    """The pool is unchanged, and later tokens are the same as without warm-up."""
    folder = model_folders("qwen3")
    engine = DeviceEngine(
        folder, graph_sizes=graph_sizes, pool_filled_with=0.5, max_num_seqs=4, max_num_batched_tokens=40
    )
    limits = engine.scheduler.config
    run_warm_up(engine.forward, engine.batch, engine.sampler, limits, max_model_len=128)
    assert (engine.pool == 0.5).all()
    prompt = random_tokens(50, seed=1)
    outputs = engine.run_all({"r": prompt}, lambda _: GREEDY)
    assert outputs["r"] == Reference(folder).greedy(prompt, 24)
    assert torch.isfinite(engine.pool).all()


@pytest.mark.slow
def test_the_kernels_are_warmed_up(model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a GPU's start, all kinds of steps run over a pool of two blocks, which stay unchanged. Filters
    are searched in logits of both existing types: each has its kernel."""
    floors, searched = TritonSamplingOps.floors, set()

    def recorded(ops: TritonSamplingOps, logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        searched.add(logits.dtype)
        return floors(ops, logits, *rest)

    monkeypatch.setattr(TritonSamplingOps, "floors", recorded)
    monkeypatch.setattr(device_sampler, "MAX_LISTED", 100)  # a real vocabulary is larger than this limit
    options = ModelConfig(model=str(model_folders("qwen3")), device="cpu", dtype="float16", max_model_len=20)
    loaded = load_model(options)
    config = EngineConfig(
        model=ModelConfig(model=""),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=20),
    )
    spec = spec_of(loaded, block_size=4)
    pool = spec.allocate(2, loaded.device)
    GPUBackend(loaded, pool, spec.places, config, ALONE).warm_up()
    assert not pool.any()
    assert searched == {torch.float16, torch.float32}
