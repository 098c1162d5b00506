"""Two ranks under random loads: every answer is that of its prompt alone, from an undivided model."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.worker.loading.tiny_models import make_model_folder
from tests.worker.random_loads import LoadDrawer, Oracle, wrong_answers

pytestmark = pytest.mark.slow


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("float32", {"family": "qwen3"}, {"async_scheduling": True}),
    "bf16": ("bfloat16", {"family": "qwen3"}, {}),
    "experts by rank": (
        "float32",
        {
            "family": "qwen3_moe",
            "extra_config": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        },
        {"async_scheduling": True, "enable_expert_parallel": True},
    ),
    "latents": (
        "float32",
        {
            "family": "deepseek_v2",
            "extra_config": {
                "kv_lora_rank": 48,
                "q_lora_rank": None,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
            },
        },
        {"async_scheduling": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_that_of_its_prompt_alone(case: str, tmp_path: Path) -> None:
    """Duplicates, block boundaries, turns and clients that leave, in a pool for little more than the longest
    of them; evicted KV is loaded from host memory. In fp32 scheduling is async."""
    dtype, model, options = CASES[case]
    folder = make_model_folder(tmp_path, **model, dtype=dtype, hidden_size=128, num_heads=4)
    oracle = Oracle(folder, dtype=dtype)
    block_size = 8
    load = LoadDrawer(Random(1), oracle, block_size, (60, 190)).draw(60)
    num_blocks = -(-load.longest // block_size) + 2
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        tensor_parallel_size=2,
        block_size=block_size,
        max_model_len=load.longest + 1,
        num_gpu_blocks_override=3 * num_blocks // 2,
        num_host_blocks_override=4 * num_blocks,
        max_num_batched_tokens=256,
        **options,
    ) as llm:
        assert wrong_answers(llm, load, oracle) == []
        llm.engine.check_invariants()
    oracle.close()
