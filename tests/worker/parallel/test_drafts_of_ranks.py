"""Drafts that two processes verify: both accept the same, and answers equal those of one without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core_process import step_costs
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from tests.worker.conftest import ModelFolders
from tests.worker.counted_drafts import DraftCounts

pytestmark = pytest.mark.slow

REPEATED = [5, 9, 13, 2, 7, 11, 30, 31]
PROMPTS = [REPEATED * 6, REPEATED * 4 + [1, 2, 3] + REPEATED * 3, list(range(40)), [8] * 30]
FEW = list(range(12))
"""Tokens that repeat often when drawn at random."""
NUM_TOKENS = 40
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 9, "seed": 3, "allowed_token_ids": FEW, "logprobs": 1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.3},
    "grammar": {
        "temperature": 0.0,
        "structured_outputs": StructuredOutputsParams(regex="(red blue ){8}"),
    },
    "said": {"temperature": 0.0, "replay_token_ids": REPEATED * 5},
}
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 8, "weigh_costs": False}
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
    "num_speculative_tokens": 5,
    "weigh_costs": False,
}


def answers(folder: Path, **options: Any) -> dict[str, list[CompletionOutput]]:
    """Answers of each kind to all prompts. Blocks suffice for two requests, and prompts are cut."""
    scarce: dict[str, Any] = {"num_gpu_blocks_override": 24, "block_size": 8, "max_num_batched_tokens": 48}
    told = {}
    with LLM(
        str(folder), multiprocess=False, device="cpu", dtype="float32", max_model_len=128, **scarce | options
    ) as llm:
        for kind, given in KINDS.items():
            params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": kind != "grammar", **given})
            told[kind] = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        llm.engine.check_invariants()
    return told


def assert_equal(
    drafted: dict[str, list[CompletionOutput]], plain: dict[str, list[CompletionOutput]]
) -> None:
    for kind, outputs in plain.items():
        assert [each.token_ids for each in drafted[kind]] == [each.token_ids for each in outputs], kind
        assert [each.finish_reason for each in drafted[kind]] == [each.finish_reason for each in outputs]
    entries = [[each.logprobs or () for each in told["sampled"]] for told in (drafted, plain)]
    ours, theirs = ([place.top[0].logprob for each in told for place in each] for told in entries)
    assert len(theirs) == NUM_TOKENS * len(PROMPTS)
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.fixture(scope="module")
def plain(model_folders: ModelFolders) -> dict[str, list[CompletionOutput]]:
    """Answers of one process without drafts."""
    return answers(model_folders("qwen3"))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("drafter", [SUFFIX, NGRAM], ids=lambda drafter: str(drafter["method"]))
def test_two_ranks_with_drafts_answer_as_one_without(
    drafter: dict[str, Any],
    async_scheduling: bool,
    model_folders: ModelFolders,
    plain: dict[str, list[CompletionOutput]],
) -> None:
    """Greedy and seeded answers, with penalties and a grammar, are equal with preemption and chunks."""
    folder, counts = model_folders("qwen3"), DraftCounts()
    drafted = answers(
        folder,
        tensor_parallel_size=2,
        speculative_config=drafter,
        async_scheduling=async_scheduling,
        executor_factory=counts,
    )
    assert_equal(drafted, plain)
    assert counts.num_drafts > counts.num_accepted > NUM_TOKENS


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_by_rank_verify_drafts(name: str, model_folders: ModelFolders) -> None:
    """Half of the experts are on each rank; with one block table and with two."""
    folder, counts = model_folders(name), DraftCounts()
    options: dict[str, Any] = {"num_gpu_blocks_override": 40}
    drafted = answers(
        folder,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        speculative_config=SUFFIX,
        executor_factory=counts,
        **options,
    )
    assert_equal(drafted, answers(folder, **options))
    assert counts.num_accepted > NUM_TOKENS


class _FreeRows(DraftCounts):
    """Two ranks, and a clock on which each step takes the same time."""

    def perf_counter(self) -> float:
        return 0.01 * self.num_steps


def test_steps_of_ranks_are_timed_at_start_up(
    model_folders: ModelFolders,
    plain: dict[str, list[CompletionOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measurement uses all ranks and leaves nothing behind: later drafts change no answer."""
    folder, costs = model_folders("qwen3"), _FreeRows()
    monkeypatch.setattr(step_costs, "time", costs)
    said = SamplingParams(replay_token_ids=REPEATED * 5, max_tokens=NUM_TOKENS, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=200,
        max_num_seqs=4,
        num_gpu_blocks_override=200,
        executor_factory=costs,
        speculative_config={"method": "suffix"},
    ) as llm:
        num_timed, num_measured = costs.num_steps, costs.num_drafts
        repeated = llm.generate(PROMPTS[0], said, use_tqdm=False)[0]
        drafted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        llm.engine.check_invariants()
    assert num_timed > 0
    assert num_measured > 0
    assert costs.num_drafts - num_measured > NUM_TOKENS // 2
    assert repeated.outputs[0].token_ids == REPEATED * 5
    assert drafted == [each.token_ids for each in plain["greedy"]]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_drafters_with_weights_are_refused_by_name(method: str, model_folders: ModelFolders) -> None:
    folder = str(model_folders("qwen3"))
    wanted = {"method": method} | ({} if method == "mtp" else {"model": folder})
    with pytest.raises(ConfigError, match=f"method {method} supports only one rank so far"):
        LLM(folder, multiprocess=False, device="cpu", tensor_parallel_size=2, speculative_config=wanted)
