"""``--stream-interval``: fewer, larger events in a stream."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server

BODY = {"prompt": "one two three", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_events_hold_as_many_tokens(tmp_path: Path) -> None:
    """The first token is sent at once, the rest with the end; nothing is missing. On a slow machine events
    may be merged."""
    folder = make_model_folder(tmp_path / "model")
    flags = ("--num-gpu-blocks-override", "70", "--max-model-len", "512", "--stream-interval", "5")
    with running_server(folder, *flags) as server:
        url = f"{server.url}/v1/completions"
        whole = httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"]
        lines = httpx.post(
            url, json={**BODY, "stream": True, "return_token_ids": True}, timeout=60
        ).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    counts = [len(choice["token_ids"]) for choice in choices if choice.get("token_ids")]
    assert counts[0] == 1 or counts[0] > 5
    assert sum(counts) == 12
    assert all(count >= 5 for count in counts[1:-1]), "the last one has what is left, or is merged with it"
    assert "".join(choice["text"] for choice in choices) == whole


def test_an_interval_of_no_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--stream-interval", "0"]) == 2
    assert "--stream-interval: stream_interval must be at least 1" in capsys.readouterr().err
