"""``continuum serve --tensor-parallel-size 2``, or ``--pipeline-parallel-size 2``: its answers, and what
happens if a rank ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from continuum.cli.main import main
from engine.config.engine_config import ModelConfig
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.processes.support import has_gone
from tests.worker.generation import Reference, random_tokens
from tests.worker.parallel.ranks import rank_pids

pytestmark = pytest.mark.slow

FLAGS = (
    *("--device", "cpu", "--scheduling-policy", "fcfs"),
    *("--num-gpu-blocks-override", "2100", "--max-model-len", "32768", "--max-num-batched-tokens", "64"),
)
WAYS = ["--tensor-parallel-size", "--pipeline-parallel-size"]
ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=32768)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_the_model_until_a_rank_is_killed(folder: Path, way: str) -> None:
    """A prompt longer than the budget and a grammar are answered; after kill -9 of an idle rank: 503, exit
    code 1, and no process left behind."""
    prompt = random_tokens(100, seed=1)
    with (
        running_server(folder, way, "2", *FLAGS) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        expected = Reference(folder).greedy(prompt, 16)
        assert choice["text"] == Tokenizer.load(ModelConfig(model=str(folder))).decode(expected)
        chosen = {"prompt": "x", "max_tokens": 20, "structured_outputs": {"choice": ["red", "green"]}}
        assert http.post("/v1/completions", json=chosen).json()["choices"][0]["text"] in ("red", "green")

        core = server.core_pid()
        ranks = rank_pids(core)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert server.wait(8) == 1
        assert all(has_gone(pid) for pid in (core, *ranks))


@pytest.mark.parametrize("way", WAYS)
def test_when_a_rank_is_killed_streams_end_and_the_server_leaves(folder: Path, way: str) -> None:
    """After kill -9 of a rank in the middle of a step: an error in every stream, 503 from then on, exit code
    1, and no process left behind."""
    with (
        running_server(folder, way, "2", *FLAGS) as server,
        httpx.Client(base_url=server.url, timeout=20) as http,
        http.stream("POST", "/v1/completions", json=ENDLESS) as response,
    ):
        lines = filter(None, response.iter_lines())
        next(lines)
        core = server.core_pid()
        ranks = rank_pids(core)
        os.kill(ranks[0], signal.SIGKILL)
        *_, failed, done = lines
        assert done == "data: [DONE]"
        assert json.loads(failed.removeprefix("data: "))["error"]["code"] == 503
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.wait(8) == 1
        assert all(has_gone(pid) for pid in (core, *ranks))


def test_what_cannot_be_cut_is_one_sentence(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A rank's error at its start reaches the user unchanged."""
    assert main(["serve", str(folder), "-tp", "3", "--device", "cpu", "--port", "0"]) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert all(said.startswith("Loading ") for said in progress)
    assert line.endswith("tensor_parallel_size is 3, which does not divide the model's number of heads, 4.")
