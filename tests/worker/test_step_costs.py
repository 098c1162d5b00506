"""A step's cost is measured at start-up, and drafts are verified where they bring more than that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core_process import step_costs
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import ModelFolders
from tests.worker.counted_drafts import DraftCounts

SAID = [7, 3, 9, 4, 1, 8] * 8
PARAMS = SamplingParams(replay_token_ids=SAID, max_tokens=len(SAID), ignore_eos=True)


@dataclass(slots=True)
class _Costs(DraftCounts):
    """A real executor, and a clock on which its steps take the given seconds."""

    seconds_of: Callable[[int], float] = float
    """Seconds by the number of a step's tokens."""
    now_s: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now_s

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        DraftCounts.take(self, plan, output)
        self.sizes.append(plan.total_num_scheduled_tokens)
        self.now_s += self.seconds_of(plan.total_num_scheduled_tokens)


def _say(
    folder: Path, costs: _Costs, monkeypatch: pytest.MonkeyPatch, num_requests: int = 1, **options: Any
) -> int:
    """Lets requests repeat themselves; returns the number of their drafts."""
    monkeypatch.setattr(step_costs, "time", costs)
    given: dict[str, Any] = {
        "max_model_len": 200,
        "num_gpu_blocks_override": 900,
        "max_num_seqs": 16,
        "dtype": "float32",
    }
    with LLM(
        str(folder),
        multiprocess=False,
        executor_factory=costs,
        speculative_config={"method": "suffix"},
        **given | options,
    ) as llm:
        num_measured = costs.num_drafts
        prompts = [[*SAID, index] for index in range(num_requests)]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        llm.engine.check_invariants()
    assert [output.outputs[0].token_ids for output in outputs] == [SAID] * num_requests
    return costs.num_drafts - num_measured


def test_where_rows_are_free_all_likely_drafts_are_verified(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _say(model_folder, _Costs(seconds_of=lambda rows: 0.01), monkeypatch) > len(SAID) // 2


def test_where_each_row_costs_a_step_none_are(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _say(model_folder, _Costs(seconds_of=lambda rows: 0.01 * rows), monkeypatch) == 0


def test_drafts_are_off_by_themselves_under_load(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows cost as much as one, and then each costs more than a token is worth."""
    seconds_of = lambda rows: 0.01 if rows <= 8 else 0.01 + 0.004 * (rows - 8)  # noqa: E731
    assert _say(model_folder, _Costs(seconds_of=seconds_of), monkeypatch) > 0
    assert _say(model_folder, _Costs(seconds_of=seconds_of), monkeypatch, num_requests=16) <= 16 * 4


def test_a_slow_model_is_not_measured_for_long(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two sizes with drafts and two without are measured, and no more when the time is up."""
    costs = _Costs(seconds_of=lambda rows: 2.0)
    _say(model_folder, costs, monkeypatch)
    before = costs.sizes[: costs.sizes.index(len(SAID) + 1)]
    assert max(before) == 16, "no step of 128 requests, and none of 16 with drafts"


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss"])
def test_nothing_is_left_of_it(
    family: str, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one KV cache group and several, as many requests as there are rows run after it."""
    assert _say(model_folders(family), _Costs(seconds_of=float), monkeypatch, 20, max_num_seqs=16) == 0


def test_a_pool_without_room_is_not_measured(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts that are likely enough are then verified."""
    costs = _Costs(seconds_of=float)
    assert _say(model_folder, costs, monkeypatch, num_gpu_blocks_override=8, max_model_len=100) > 0
    assert max(costs.sizes) == len(SAID) + 1
