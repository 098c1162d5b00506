"""No request waits for a compiler: the warm-up runs compile every kernel that serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.worker.loading.tiny_models import make_model_folder

pytestmark = pytest.mark.slow


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


DRAFTS = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 16, "weigh_costs": False}}
CASCADE = {"disable_cascade_attn": False}


@pytest.mark.parametrize(
    ("family", "features"),
    [
        pytest.param("qwen3", {}, id="qwen3-plain", marks=pytest.mark.long),
        pytest.param("qwen3", DRAFTS, id="qwen3-drafts", marks=pytest.mark.long),
        pytest.param("qwen3", CASCADE, id="qwen3-cascade", marks=pytest.mark.long),
        pytest.param("qwen3", CASCADE | DRAFTS, id="qwen3-cascade-drafts", marks=pytest.mark.long),
        pytest.param("qwen3_moe", {}, id="qwen3_moe-plain"),
        pytest.param("qwen3_moe", DRAFTS, id="qwen3_moe-drafts", marks=pytest.mark.long),
    ],
)
def test_serving_launches_no_kernel_that_was_not_warmed_up(
    family: str, features: dict[str, Any], tmp_path: Path
) -> None:
    """For any numbers of requests and tokens, any parameters, drafts of any length, and with a prefix."""
    folder = make_model_folder(
        tmp_path / "model",
        family,
        extra_config=FAMILIES[family],
        hidden_size=64,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=2047,
        max_position_embeddings=4096,
        dtype="bfloat16",
        weights=False,
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.gpu.launches", str(folder), json.dumps(features)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        check=True,
    )
    num_warmed_up, later = json.loads(done.stdout.splitlines()[-1])
    assert num_warmed_up > 10
    assert not later
