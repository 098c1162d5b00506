"""Drafts change only the number of steps of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from continuum.cli.main import main
from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.frontend.request_output import CompletionOutput
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams
from engine.worker.states import torch_states
from tests.worker.conftest import ModelFolders
from tests.worker.counted_drafts import DraftCounts

REPEATED = [5, 9, 13, 2, 7, 11, 30, 31]
PROMPTS = [REPEATED * 6, REPEATED * 4 + [1, 2, 3] + REPEATED * 3, list(range(40)), [8] * 30]
SCARCE: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 24,
    "block_size": 8,
    "max_num_batched_tokens": 48,
}
"""Blocks for two of the requests: others are preempted, prompts are cut, and some drafts do not fit."""
DRAFTERS: list[dict[str, Any]] = [
    {"method": "suffix", "num_speculative_tokens": 8, "weigh_costs": False},
    {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 5,
        "weigh_costs": False,
    },
]
FEW = list(range(12))
"""Tokens that repeat often when drawn at random."""
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3, "allowed_token_ids": FEW},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.3},
    "counted": {
        "temperature": 0.7,
        "seed": 5,
        "frequency_penalty": 0.2,
        "min_p": 0.05,
        "allowed_token_ids": FEW,
    },
    "biased": {"temperature": 0.0, "logit_bias": {5: 4.0, 9: 4.0}, "min_tokens": 20, "stop_token_ids": [9]},
    "stopped": {"temperature": 0.0, "stop_token_ids": [5, 11, 100], "ignore_eos": False},
    "said": {"temperature": 0.0, "replay_token_ids": REPEATED * 6},
}


def answers(folder: Path, params: dict[str, Any], **options: Any) -> list[CompletionOutput]:
    options = SCARCE | options
    given = SamplingParams(**{"max_tokens": 47, "ignore_eos": True, **params})
    with LLM(str(folder), multiprocess=False, dtype="float32", **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, given, use_tqdm=False)]
        llm.engine.check_invariants()
    return outputs


def logprobs_of(outputs: list[CompletionOutput]) -> list[float]:
    places = [place for output in outputs for place in output.logprobs or ()]
    return [each.logprob for place in places for each in place.top]


@pytest.fixture(scope="module")
def folder(model_folders: ModelFolders) -> Path:
    return model_folders("qwen3")


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: str(drafter["method"]))
@pytest.mark.parametrize("kind", PARAMS)
def test_an_answer_is_that_without_drafts(
    kind: str, drafter: dict[str, Any], async_scheduling: bool, folder: Path
) -> None:
    """Answers are equal under preemption, with chunked prompts, and with all parameters."""
    plain, counts = answers(folder, PARAMS[kind]), DraftCounts()
    drafted = answers(
        folder,
        PARAMS[kind],
        speculative_config=drafter,
        async_scheduling=async_scheduling,
        executor_factory=counts,
    )
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert [output.finish_reason for output in drafted] == [output.finish_reason for output in plain]
    assert [output.stop_reason for output in drafted] == [output.stop_reason for output in plain]
    assert logprobs_of(drafted) == pytest.approx(logprobs_of(plain), abs=1e-4)
    assert counts.num_drafts > 0
    assert kind != "said" or counts.num_accepted > 40


@pytest.mark.parametrize("name", ["granite4", "qwen3-next", "nemotron-h", "lfm2"])
@pytest.mark.parametrize("ops", ["compiled", "torch"])
def test_states_are_those_behind_the_drafts_that_were_taken(
    name: str, ops: str, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded samples of a model with states are equal with any code that computes them."""
    if ops == "torch":
        monkeypatch.setattr("engine.worker.states.state_pool.select_state_ops", lambda device: torch_states)
    prompts = [[60, 61, 62, 63, 64] * 7, [65, 66, 67] * 9]
    params = SamplingParams(
        temperature=0.8, seed=11, max_tokens=60, ignore_eos=True, allowed_token_ids=list(range(60, 66))
    )
    said = []
    for drafts in (None, {"method": "suffix", "weigh_costs": False}):
        counts = DraftCounts()
        with LLM(
            str(model_folders(name)),
            multiprocess=False,
            dtype="float32",
            speculative_config=drafts,
            executor_factory=counts,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        said.append([output.outputs[0].token_ids for output in outputs])
    assert said[0] == said[1]
    assert 0 < counts.num_accepted < counts.num_drafts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metod": "suffix"}, "unknown field 'metod'; choose from method, "),
        ({"method": "oracle"}, "method must be one of suffix, ngram"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens: expected int, got str."),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0."),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_max must be at least 3, got 2."),
        ("suffix", "must be a JSON object"),
    ],
)
def test_what_is_wrong_in_the_config_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM("m", speculative_config=given)
    assert str(error.value).startswith("speculative_config")
    assert said in str(error.value)


def test_a_job_is_drafted_from_another_of_its_kind(folder: Path) -> None:
    """A job's drafts come from a job whose prompt began alike, although not from its own prompt."""
    said = [40, 60, 80, 41, 61, 81, 42, 62, 82, 43, 63, 83, 44, 64, 84, 45] * 2
    counts = DraftCounts()
    config = {"method": "suffix", "weigh_costs": False}
    params = SamplingParams(replay_token_ids=said, max_tokens=len(said), ignore_eos=True)
    with LLM(
        str(folder),
        multiprocess=False,
        num_gpu_blocks_override=100,
        max_model_len=200,
        executor_factory=counts,
        speculative_config=config,
    ) as llm:
        llm.generate([[1] * 20 + [2]], params, use_tqdm=False, jobs=JobRef("a"))
        before = counts.num_steps
        llm.generate([[1] * 20 + [3]], params, use_tqdm=False, jobs=JobRef("b"))
    assert counts.num_steps - before <= len(said) // 2


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: str(drafter["method"]))
def test_a_replay_decides_the_same(
    drafter: dict[str, Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the trace alone, without a drafter, ``continuum trace replay`` finds no difference."""
    trace, counts = tmp_path / "trace.jsonl", DraftCounts()
    answers(
        folder,
        PARAMS["sampled"],
        speculative_config=drafter,
        executor_factory=counts,
        trace_path=str(trace),
    )
    assert counts.num_drafts > counts.num_accepted > 0
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["trace", "validate", str(trace)]) == 0
