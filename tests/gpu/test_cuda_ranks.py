"""Two GPUs compute one model: over NCCL the same promises hold as over gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from engine.errors import EngineDeadError
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.generation import Reference, random_tokens
from tests.worker.parallel.ranks import rank_pids, two_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices"),
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """Chunks, hits, preemption and graphs change no token; a rank that is killed fails the step."""
    folder = make_model_folder(tmp_path, family, num_heads=4, num_kv_heads=2, hidden_size=256)
    shared = random_tokens(27, seed=1)
    prompts = [shared[: 9 * (i % 4)] + random_tokens(7 + 5 * i, seed=10 + i) for i in range(6)]
    reference = Reference(folder, device="cuda")
    with two_ranks(folder, num_blocks=22, max_num_batched_tokens=24, device="cuda") as engine:
        for index, prompt in enumerate(prompts):
            greedy = SamplingParams(temperature=0.0, max_tokens=20 + index, ignore_eos=True)
            engine.add(f"r{index}", prompt, greedy)
            engine.step()
        outputs = engine.run()
        assert engine.num_preemptions > 0
        for index, prompt in enumerate(prompts):
            assert outputs[f"r{index}"] == reference.greedy(prompt, 20 + index)
        engine.add("last", prompts[0])
        os.kill(rank_pids(os.getpid())[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="Rank 1"):
            engine.run()
