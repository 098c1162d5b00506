"""KV that pins hold when an engine stops: the next engine goes on with the jobs as if it had run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from continuum.policy import ContinuumPolicyFactory
from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import MODEL_NAMES, ModelFolders
from tests.worker.generation import Reference, random_tokens

BLOCK = 8
NUM_OUTPUT = 12
LENGTHS = (70, 91, 133)
ANSWER = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
HELD_S = 600.0


@contextmanager
def engine(model: Path, shared: Path, **options: Any) -> Iterator[LLM]:
    """An engine of the agent policy that hands over what its pins hold."""
    given = {"multiprocess": False, "max_model_len": 256, "num_gpu_blocks_override": 400, **options}
    llm = LLM(
        str(model),
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_num_batched_tokens=64,
        scheduling_policy=ContinuumPolicyFactory(),
        kv_handover_path=str(shared),
        **given,
    )
    try:
        yield llm
    finally:
        llm.close()


def ask(llm: LLM, prompts: list[list[int]], names: Sequence[str | None]) -> list[RequestOutput]:
    """The next turns of these jobs; None: the client names none."""
    jobs = [JobRef(name, asked_ttl_s=HELD_S) for name in names]
    return llm.generate(prompts, ANSWER, use_tqdm=False, jobs=jobs)


def said(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_jobs_go_on_in_the_next_engine(name: str, model_folders: ModelFolders, tmp_path: Path) -> None:
    """Of the first turns nothing is computed again but the block that is not full; the tokens are those of
    transformers, and the receipt says that the turn is the job's second."""
    model = model_folders(name)
    reference = Reference(model)
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    names = [f"job-{length}" for length in LENGTHS]
    with engine(model, tmp_path) as first:
        answers = [said(output) for output in ask(first, prompts, names)]
    following = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    with engine(model, tmp_path) as second:
        for prompt, job, before in zip(following, names, prompts, strict=True):
            (output,) = ask(second, [prompt], [job])
            assert said(output) == reference.greedy(prompt, NUM_OUTPUT)
            num_computed = len(before) + NUM_OUTPUT - 1
            assert (output.num_cached_tokens or 0) >= num_computed // BLOCK * BLOCK
            assert output.receipt is not None
            assert output.receipt.turn == 2
            assert output.receipt.recomputed_tokens == 0
            assert output.receipt.previous_pin == "handed_over"
