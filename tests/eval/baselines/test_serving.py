"""Baselines work in the real server too."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from eval.baselines.catalog import policy_names, serving_policy
from tests.api.server import running_server

pytestmark = pytest.mark.slow


def test_a_server_runs_a_baseline(tmp_path: Path) -> None:
    """Under fixed-ttl a job's turn stays pinned: the next turn finds it after others have filled the rest of
    the pool."""
    model = make_model_folder(tmp_path / "model", max_position_embeddings=512)
    flags = ("--scheduling-policy", "fixed-ttl:600", "--num-gpu-blocks-override", "33")
    with running_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:

        def cached_tokens(prompt: list[int], **fields: str) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return cached

        history = [7, *range(100, 259)]
        assert cached_tokens(history, job_id="a") == 0
        for other in range(8, 12):
            assert cached_tokens([other] * 320) == 0
        assert cached_tokens([*history, 5, 6, 7], job_id="a") == 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


def generated(folder: Path, policy: str) -> list[list[int]]:
    """The outputs for eight prompts that do not fit into a pool of 24 blocks together, and for the first four
    again."""
    prompts = [[100 + number] * (16 * (1 + number % 4) + number) for number in range(8)]
    with LLM(
        str(folder),
        scheduling_policy=serving_policy(policy),
        multiprocess=False,
        dtype="float32",
        block_size=16,
        num_gpu_blocks_override=24,
        max_num_seqs=4,
    ) as llm:
        outputs = llm.generate(
            [*prompts, *prompts[:4]], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("policy", [syntax.partition("[")[0] for syntax, _ in policy_names(serving=True)])
def test_any_policy_has_the_model_say_the_same(folder: Path, policy: str) -> None:
    """Order, preemption and eviction of a policy do not change outputs of the real engine."""
    tokens = generated(folder, policy)
    assert tokens == generated(folder, "fcfs")
    assert all(len(each) == 24 for each in tokens)
