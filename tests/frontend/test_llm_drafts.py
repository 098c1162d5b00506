"""``LLM`` with drafts of each method: the same tokens, in fewer steps where a text repeats itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tracing.events import StepDecision
from tracing.reader import read_trace

REPEATED = list(range(20, 36)) * 4
"""Tokens of the prompt that the model then repeats."""
Drafts = dict[str, Any]
METHODS: list[Drafts] = [
    {"method": "suffix", "weigh_costs": False},
    {"method": "ngram", "prompt_lookup_min": 2, "weigh_costs": False},
]


def say(
    folder: Path, trace: Path, method: Drafts | None, params: SamplingParams
) -> tuple[list[list[int]], int]:
    """Returns the tokens of two prompts, and the number of steps."""
    prompts = [REPEATED, REPEATED[3:40]]
    with LLM(
        folder,
        multiprocess=False,
        num_gpu_blocks_override=300,
        speculative_config=method,
        trace_path=str(trace),
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    steps = sum(isinstance(event, StepDecision) for event in read_trace(trace))
    return [output.outputs[0].token_ids for output in outputs], steps


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["method"])
def test_greedy_tokens_are_those_without_drafts(model_folder: Path, tmp_path: Path, method: Drafts) -> None:
    """Greedy tokens equal those without drafts, whatever is drafted and rejected."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with_drafts, _ = say(model_folder, tmp_path / "with.jsonl", method, params)
    without, _ = say(model_folder, tmp_path / "without.jsonl", None, params)
    assert with_drafts == without


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["method"])
def test_a_text_that_is_said_again_takes_fewer_steps(
    model_folder: Path, tmp_path: Path, method: Drafts
) -> None:
    """When the model repeats its prompt, more than half of the steps are saved."""
    said = REPEATED[:40]
    params = SamplingParams(temperature=0, max_tokens=len(said), ignore_eos=True, replay_token_ids=said)
    tokens, steps = say(model_folder, tmp_path / "trace.jsonl", method, params)
    assert tokens == [said, said]
    assert steps < len(said) / 2
