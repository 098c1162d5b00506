"""Servers share a folder of KV: another server, and the next start, load what one has computed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from continuum.cli.main import main
from tests.api.server import Server, running_server
from tests.api.test_kv_transfer import FLAGS, cached_tokens, completion, gauge, post

NOT_WORTH_LOADING = 64 + 16
"""Tokens that a server prefers to recompute, plus those of a partial block."""


def flags(shared: Path, role: str = "kv_both", **extra: Any) -> tuple[str, ...]:
    config = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(shared), **extra},
    }
    return (*FLAGS, "--kv-transfer-config", json.dumps(config))


def turn(server: Server, messages: list[dict[str, str]]) -> Any:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    create: Any = client.chat.completions.create  # its overloads want each message's own type
    return create(
        model="tiny", messages=messages, max_tokens=24, temperature=0, extra_body={"job_id": "a-job"}
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_job_goes_on_elsewhere_and_after_a_restart(model_folder: Path, tmp_path: Path) -> None:
    """A turn finds its history's KV on either server and after a restart; both traces replay."""
    shared, traces = tmp_path / "kv", [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    messages = [{"role": "user", "content": "Read the file, and say what is in it. " * 5}]
    with (
        running_server(model_folder, *flags(shared), "--trace", str(traces[0])) as one,
        running_server(model_folder, *flags(shared), "--trace", str(traces[1])) as two,
    ):
        history = 0
        for number in range(4):
            answer = turn((one, two)[number % 2], messages)
            if number:
                assert answer.usage.prompt_tokens_details.cached_tokens > history - NOT_WORTH_LOADING
            history = answer.usage.prompt_tokens
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": f"And what is in file {number}?"}]
        assert gauge(two, "continuum:remote_kv_loaded_tokens_total") > 0
        os.kill(two.core_pid(), signal.SIGKILL)
        assert one.interrupt() == 0
    assert main(["trace", "replay", str(traces[0])]) == 0
    with running_server(model_folder, *flags(shared, "kv_consumer")) as again:
        answer = turn(again, messages)
        assert answer.usage.prompt_tokens_details.cached_tokens > history - NOT_WORTH_LOADING


@pytest.mark.slow
def test_owners_and_salts_share_nothing(model_folder: Path, tmp_path: Path) -> None:
    """As in the prefix cache, KV saved for one tenant or salt is not read by another."""
    keys = [flag for name in ("alice", "bob") for flag in ("--api-key", f"{name}:key-of-{name}")]
    body = completion(1)
    asked = [("alice", None), ("alice", "salt"), ("bob", None), ("bob", "salt")]
    for expected in (0, 192):
        with running_server(model_folder, *flags(tmp_path / "kv"), *keys) as server:
            for name, salt in asked:
                header = {"Authorization": f"Bearer key-of-{name}"}
                answer = post(server, "/v1/completions", {**body, "cache_salt": salt}, **header)
                assert cached_tokens(answer) == expected


def test_a_folder_that_cannot_be_used_is_said(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, log = exit_of(model_folder, flags(tmp_path / "file" / "kv"))
    assert code != 0
    assert "shared_storage_path" in log
    assert "cannot be written to" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"shared_storage_path": None}, "need each other"),
        ({"shared_storage_max_bytes": 0}, "must be at least 1"),
        ({"shared_storage_paths": "x"}, "shared_storage_paths"),
    ],
)
def test_what_is_wrong_is_said(extra: dict[str, Any], said: str, model_folder: Path, tmp_path: Path) -> None:
    code, log = exit_of(model_folder, flags(tmp_path, **extra))
    assert code != 0
    assert said in log


def exit_of(model: Path, given: tuple[str, ...]) -> tuple[int, str]:
    command = [sys.executable, "-m", "continuum.cli", "serve", str(model), "--port", "0", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr + done.stdout
