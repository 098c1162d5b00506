"""``continuum serve --speculative-config``: the answers are those of a server without drafts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from engine.frontend.llm import LLM
from tests.api.server import running_server
from tests.worker.conftest import ModelFolders

FLAGS = (
    *("--device", "cpu", "--scheduling-policy", "continuum", "--num-gpu-blocks-override", "60"),
    *("--max-model-len", "300", "--dtype", "float32"),
)
SUFFIX = ("--speculative-config", '{"method": "suffix", "weigh_costs": false}')
MTP = ("--speculative-config", '{"method": "mtp"}')
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["left", "right"]}, "maxItems": 4}},
    "required": ["names"],
    "additionalProperties": False,
}


def bodies() -> list[dict[str, Any]]:
    """Requests with a repetitive text, a grammar, several samples, and a stop string."""
    plain = {"prompt": [5, 6, 7, 8] * 9, "max_tokens": 40, "temperature": 0, "job_id": "job"}
    return [
        plain,
        plain | {"structured_outputs": {"json": SCHEMA}, "temperature": 0.9, "seed": 4},
        plain | {"n": 2, "temperature": 0.7, "seed": 1, "allowed_token_ids": list(range(60, 70))},
        plain | {"stop": ["e"], "allowed_token_ids": list(range(60, 90))},
    ]


def answers(folder: Path, *flags: str) -> list[Any]:
    with (
        running_server(folder, *FLAGS, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        found = [http.post("/v1/completions", json=body) for body in bodies()]
    assert [answer.status_code for answer in found] == [200] * len(found), [each.text for each in found]
    return [
        [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]] for answer in found
    ]


@pytest.mark.slow
def test_answers_are_those_of_a_server_without_drafts(model_folder: Path) -> None:
    assert answers(model_folder, *SUFFIX) == answers(model_folder)


@pytest.mark.slow
def test_so_are_those_of_a_model_with_states(model_folders: ModelFolders) -> None:
    folder = model_folders("granite4")
    assert answers(folder, *SUFFIX) == answers(folder)


@pytest.mark.slow
def test_a_drafter_with_weights_says_that_it_knows_no_states(model_folders: ModelFolders) -> None:
    with pytest.raises(ConfigError, match="does not draft yet for models that have layers with states"):
        LLM(
            str(model_folders("granite4")),
            multiprocess=False,
            speculative_config={"method": "draft_model", "model": str(model_folders("llama"))},
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--speculative-config", "suffix"), "speculative_config must be a JSON object"),
        (("--speculative-config", '{"method": "oracle"}'), "method must be one of suffix, ngram, grammar"),
        ((*MTP, "-tp", "2"), "tensor_parallel_size is 2"),
        ((*MTP, "--attention-backend", "triton"), "on CPUs only so far"),
    ],
)
def test_what_cannot_be_served_is_said(flags: tuple[str, ...], said: str, model_folder: Path) -> None:
    """Unsupported options are refused in a sentence, before anything is served."""
    command = [sys.executable, "-m", "continuum.cli.main", "serve", str(model_folder), "--port", "0"]
    ended = subprocess.run(
        [*command, *FLAGS, *flags], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode not in (0, None)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
