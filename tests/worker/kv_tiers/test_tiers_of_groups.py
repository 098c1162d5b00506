"""Host and disk tiers under models whose layers see different parts of a sequence: KV that was offloaded by
group and loaded back gives the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from continuum.cli.main import main
from engine.frontend.llm import LLM
from engine.worker import executor
from engine.worker.kv_tiers.disk_pool import DiskPool
from engine.worker.kv_tiers.host_pool import HostTransfers
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.worker.generation import random_tokens
from tests.worker.kv_tiers.test_device_host_pool import LatePool
from tests.worker.kv_tiers.test_disk_tier import Jobs
from tests.worker.test_other_attention import saved
from tests.worker.test_several_groups import NATIVE, NUM_GROUPS, OTHERS

MAX_LEN, BLOCK_SIZE, STEP_TOKENS = 256, 8, 32
NAMES = ["mistral", "qwen2", "llama4", "gemma3_text", "gpt_oss"]


def made(folder: Path, name: str) -> Path:
    """A small model with windows of 12 tokens or chunks of 20, and with a tokenizer."""
    make_model_folder(folder, **NATIVE.get(name, {}))
    if name in OTHERS:
        saved(folder, name, **OTHERS[name])
    return folder


def num_known(turn: int) -> int:
    """Tokens of all jobs with KV in full blocks at the end of this turn, counted from 0."""
    return sum((150 + 10 * job + 24 * turn + 11) // BLOCK_SIZE * BLOCK_SIZE for job in range(3))


def small_pool(name: str) -> int:
    """Blocks for little more than one sequence: two of a window and those of two steps for each group."""
    num_full = 0 if name == "mistral" else 1
    num_windowed = NUM_GROUPS[name] - num_full
    return 3 + num_full * MAX_LEN // BLOCK_SIZE + num_windowed * (2 + 2 * STEP_TOKENS // BLOCK_SIZE + 1)


def tier_of(where: str, disk: Path) -> dict[str, Any]:
    """Host memory for all of a few turns, or for little, with a disk for the rest."""
    if where == "host":
        return {"num_host_blocks_override": 200}
    return {
        "num_host_blocks_override": 48,
        "num_disk_blocks_override": 400,
        "kv_offloading_disk_path": str(disk),
        "kv_offloading_disk_min_tokens": 1,
    }


def open_llm(folder: Path, name: str, **options: Any) -> LLM:
    return LLM(
        str(folder),
        multiprocess=False,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        **({"num_gpu_blocks_override": small_pool(name)} | options),
    )


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", NAMES)
def test_turns_loaded_by_group_give_the_same_tokens(
    tmp_path: Path, name: str, where: str, async_scheduling: bool
) -> None:
    """Every later turn of three jobs finds its history, although the device holds little more than one job;
    except a block that an output filled while the previous step was planned."""
    folder = made(tmp_path / "model", name)
    options = tier_of(where, tmp_path)
    with open_llm(folder, name, async_scheduling=async_scheduling, **options) as llm:
        jobs = Jobs(llm, folder)
        assert jobs.turn() == 0
        lost = 3 * BLOCK_SIZE * async_scheduling
        assert jobs.turn() >= num_known(0) - lost
        assert jobs.turn() >= num_known(1) - lost
        llm.engine.check_invariants()
        statistics = llm.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks == small_pool(name) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_late_copies_of_groups_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On streams that overlap steps, a block that a window has left is stored before it is overwritten."""
    pools: list[LatePool] = []

    def select(
        blocks: torch.Tensor,
        num_slots: int,
        disk: DiskPool | None,
        *,
        during_steps: bool,
        num_groups: int,
        max_writes: int,
    ) -> HostTransfers:
        pools.append(LatePool(blocks, num_slots, disk, num_groups))
        return pools[-1]

    monkeypatch.setattr(executor, "select_host_pool", select)
    folder = made(tmp_path / "model", name)
    with open_llm(folder, name, num_host_blocks_override=200) as llm:
        jobs = Jobs(llm, folder)
        assert [jobs.turn() > 3 * 140 for _ in range(3)] == [False, True, True]
    assert pools[0].num_late_steps > 5


@pytest.mark.slow
def test_over_http_a_windowed_model_says_what_came_back(tmp_path: Path) -> None:
    """Usage counts the history as cached and the metrics as loaded; the trace keeps every rule and replays
    without a difference."""
    folder, trace = made(tmp_path / "model", "gpt_oss"), tmp_path / "trace.jsonl"
    flags = ["--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_LEN), "--trace", str(trace)]
    flags += ["--num-gpu-blocks-override", str(small_pool("gpt_oss")), "--kv-offloading-size", "0.01"]
    flags += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    with running_server(folder, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:

        def cached_tokens(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return cached

        history = random_tokens(160, seed=1)
        assert cached_tokens(history) == cached_tokens(random_tokens(200, seed=2)) == 0
        assert cached_tokens([*history, 5, 6, 7]) == 160
        metrics = http.get("/metrics").text.splitlines()
        loaded = [line for line in metrics if line.startswith("continuum:host_kv_loaded_tokens_total")]
        assert [float(line.split()[-1]) for line in loaded] == [160.0]
        assert server.interrupt() == 0
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0
