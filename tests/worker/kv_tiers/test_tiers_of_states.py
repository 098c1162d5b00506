"""Host and disk tiers under models whose layers have states: an evicted state is loaded back with the KV
before it, and gives the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.frontend.llm import LLM
from engine.worker import executor
from engine.worker.kv_tiers.disk_pool import DiskPool
from engine.worker.kv_tiers.host_pool import HostTransfers
from tests.worker.conftest import ModelFolders
from tests.worker.kv_tiers.test_device_host_pool import LatePool
from tests.worker.kv_tiers.test_disk_tier import Jobs
from tests.worker.kv_tiers.test_tiers_of_groups import tier_of

BLOCK_SIZE, MAX_LEN = 8, 256


def open_llm(folder: Path, **options: Any) -> LLM:
    """Opens an LLM with slots for the states of one request, and blocks for little more."""
    return LLM(
        str(folder),
        multiprocess=False,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=2 + MAX_LEN // BLOCK_SIZE,
        num_state_slots=5,
        **options,
    )


def num_known(turn: int) -> int:
    """Tokens of three jobs' prompts in the turns before this one, in full blocks with a state after them."""
    return sum((150 + 10 * job + 24 * (turn - 1) - 1) // BLOCK_SIZE * BLOCK_SIZE for job in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", ["qwen3-next", "granite4", "nemotron-h", "lfm2"])
def test_turns_whose_state_is_loaded_give_the_same_tokens(
    model_folders: ModelFolders, tmp_path: Path, name: str, where: str, async_scheduling: bool
) -> None:
    """Every later turn of three jobs continues at least from the end of its last prompt, although the device
    has slots for one request."""
    folder = model_folders(name)
    with open_llm(folder, async_scheduling=async_scheduling, **tier_of(where, tmp_path)) as llm:
        jobs = Jobs(llm, folder)
        assert jobs.turn() == 0
        assert jobs.turn() >= num_known(1)
        assert jobs.turn() >= num_known(2)
        llm.engine.check_invariants()
        statistics = llm.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks
        assert (statistics.num_used_disk_blocks > 0) == (where == "disk")


@pytest.mark.slow
def test_without_another_tier_the_states_are_gone(model_folders: ModelFolders) -> None:
    """Without another tier no turn hits: the test above would see if no state was loaded."""
    with open_llm(folder := model_folders("granite4")) as llm:
        jobs = Jobs(llm, folder)
        assert [jobs.turn(), jobs.turn()] == [0, 0]


@pytest.mark.slow
def test_late_copies_of_states_give_the_same_tokens(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On streams that overlap steps, a slot's old state is stored before the slot is written."""
    pools: list[LatePool] = []

    def select(
        blocks: torch.Tensor, num_slots: int, disk: DiskPool | None, *, num_groups: int, **_: Any
    ) -> HostTransfers:
        pools.append(LatePool(blocks, num_slots, disk, num_groups))
        return pools[-1]

    monkeypatch.setattr(executor, "select_host_pool", select)
    with open_llm(folder := model_folders("qwen3-next"), num_host_blocks_override=200) as llm:
        jobs = Jobs(llm, folder)
        wanted = (1, num_known(1), num_known(2))
        assert [jobs.turn() >= known for known in wanted] == [False, True, True]
    assert pools[0].num_late_steps > 2
