"""Ranks on a real Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.api.server import running_server
from tests.child_processes import processes_with
from tests.processes.support import has_gone
from tests.ray_cluster import MARK, add_node, cluster
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens

pytestmark = pytest.mark.slow
__all__ = ["cluster"]  # a fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "num_gpu_blocks_override": 40,
    "distributed_executor_backend": "ray",
}
DEATH_TIMEOUT_S = 15.0
"""A generous timeout: while other tests run a node takes a while to be gone. The test waits for the error."""


def cluster_ranks() -> set[int]:
    """Process ids of the ranks on this test's cluster."""
    return processes_with("engine.worker.ranks.rank_proc", f"{MARK}={os.environ[MARK]}")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3", "tensor_parallel_size"),
        pytest.param("granite4", "tensor_parallel_size", marks=pytest.mark.long),
        pytest.param("mixtral", "pipeline_parallel_size", marks=pytest.mark.long),
    ],
)
def test_two_nodes_give_the_tokens_of_one(
    name: str, way: str, model_folders: ModelFolders, cluster: Any
) -> None:
    """Each node has a CPU for one rank only; the engine leaves none of its processes behind."""
    add_node(cluster)
    folder = model_folders(name)
    prompts = [random_tokens(length, seed=length) for length in (5, 33, 60)]
    with LLM(str(folder), **(OPTIONS | {way: 2})) as llm:
        ranks = cluster_ranks()
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    reference = Reference(folder)
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference.greedy(prompt, 12) for prompt in prompts
    ]
    assert len(ranks) == 2
    assert all(has_gone(rank) for rank in ranks)


def test_what_does_not_fit_is_said(
    model_folders: ModelFolders, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what the cluster lacks, or that there is no cluster."""
    from engine.worker.ranks import ray_executor

    monkeypatch.setattr(ray_executor, "PLACE_TIMEOUT_S", 0.5)
    options = {**OPTIONS, "multiprocess": False}
    with pytest.raises(ConfigError, match=r"no place for 3 ranks .* each with 1 CPU; it has 1 CPU and 0 GPU"):
        LLM(str(model_folders("qwen3")), tensor_parallel_size=3, **options)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1"):
        LLM(str(model_folders("qwen3")), tensor_parallel_size=1, **options)


@pytest.mark.long
def test_a_node_that_is_killed_is_told_of(model_folders: ModelFolders, cluster: Any, tmp_path: Path) -> None:
    """Under load, the current answer ends with an error, and no process of the ranks is left."""
    node = add_node(cluster)
    flags = ("--device", "cpu", "--max-model-len", "2048", "--num-gpu-blocks-override", "300")
    ranks_flags = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
    with running_server(model_folders("qwen3"), *flags, *ranks_flags, log=tmp_path / "log") as server:
        ranks = cluster_ranks()
        assert len(ranks) == 2
        body = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            killer = threading.Thread(
                target=cluster.remove_node, args=(node,), kwargs={"allow_graceful": False}
            )
            killer.start()
            said = "\n".join(lines)
        killer.join()
        assert "has died" in said
        assert server.wait(DEATH_TIMEOUT_S) == 1
    # Either rank may be the first to notice.
    assert re.search(r"Rank \d of the model", (tmp_path / "log").read_text())
    assert all(has_gone(rank, DEATH_TIMEOUT_S) for rank in ranks)
