"""A drafter with weights in use: ``continuum serve`` with a draft model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file

from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.api.test_jobs_endpoints import ask, call, receipt
from tests.worker.drafts.head_folders import sharpen, tensors_of
from tests.worker.test_drafts_over_http import FLAGS, answers
from tracing.events import PrefixCacheEvent, StepDecision
from tracing.reader import read_trace

NUM_DRAFTS = 3

ROOMY = (*FLAGS, "--max-model-len", "500")


def drafting(draft: Path, method: str = "draft_model") -> tuple[str, str]:
    config = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": NUM_DRAFTS,
        "weigh_costs": False,
    }
    return "--speculative-config", json.dumps(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(make_model_folder(tmp_path_factory.mktemp("models") / "sure"))


@pytest.fixture(scope="module")
def without_a_tensor(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "partial"
    shutil.copytree(model, folder)
    tensors = tensors_of(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_answers_are_those_of_a_server_without_drafts(model: Path) -> None:
    """Answers are the same with a grammar, seeds, several samples and a stop string."""
    assert answers(model, *drafting(model)) == answers(model)


@pytest.mark.slow
def test_a_pinned_turn_comes_back_to_the_drafters_kv(model: Path, tmp_path: Path) -> None:
    """Although other requests have used the rest of the pool, all drafts of the next turn are right: a step
    yields one token more than there are drafts."""
    trace = tmp_path / "trace.jsonl"
    with (
        running_server(model, *ROOMY, *drafting(model), "--trace", str(trace)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        messages, first = call(http, "a job", job_id="one")
        for start in range(6):
            prompt = [(start * 37 + i) % 400 for i in range(250)]
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20}).raise_for_status()
        num_tokens = 1 + 8 * (NUM_DRAFTS + 1)
        second = ask(http, messages, job_id="one", max_tokens=num_tokens, ignore_eos=True, temperature=0)
        assert receipt(second)["previous_pin"] == "handed_over"
        assert receipt(second)["cached_tokens"] == receipt(first)["pinned_tokens"] > 0
        assert second["usage"]["completion_tokens"] == num_tokens
        assert server.interrupt() == 0  # the trace is complete
    events = list(read_trace(trace))
    turn = [event.req_id for event in events if isinstance(event, PrefixCacheEvent) and event.job_id == "one"]
    steps = [event for event in events if isinstance(event, StepDecision) and turn[-1] in event.tokens]
    assert len(steps) == 1 + 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nothing", "does not exist"),
        ("other tokens", "different vocabularies"),
        ("no tensor", "Tensor model.layers.1.mlp.up_proj.weight"),
        ("no head", "no supported EAGLE head"),
    ],
)
def test_a_folder_that_cannot_draft_is_refused(
    kind: str, said: str, model: Path, without_a_tensor: Path, tmp_path: Path
) -> None:
    """The start fails with one sentence and exit code 2, before anything is served."""
    folders = {"nothing": tmp_path / "none", "no tensor": without_a_tensor, "no head": model}
    if kind == "other tokens":
        folders[kind] = make_model_folder(tmp_path / "larger", vocab_size=600)
    flags = drafting(folders[kind], "eagle" if kind == "no head" else "draft_model")
    command = [sys.executable, "-m", "continuum.cli.main", "serve", str(model), "--port", "0", *FLAGS, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
