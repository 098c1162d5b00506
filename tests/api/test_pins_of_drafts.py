"""Pins of turns with partly rejected drafts: the next turn finds exactly the verified tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from tests.api.server import running_server
from tests.api.test_chat import CALL_TEXT
from tests.api.test_jobs_endpoints import Body, after, ask, counter, receipt, user

FLAGS = (
    *("--device", "cpu", "--scheduling-policy", "continuum", "--num-gpu-blocks-override", "70"),
    *("--max-model-len", "700", "--dtype", "float32"),
)
SUFFIX = (
    "--speculative-config",
    '{"method": "suffix", "num_speculative_tokens": 6, "weigh_costs": false}',
)
HOST = ("--kv-offloading-size", "0.01")
TOLD = [CALL_TEXT.replace("ls -l", command) for command in ("ls -l src", "cat a.txt")]
SAID = [CALL_TEXT.replace("ls -l", command) for command in ("ls -l lib", "cat b.txt")]
"""The prompt has some calls and the replies make others, so drafts are right up to where they differ."""
ENDED = "<|im_end|>"
BLOCK = 16


def call_turn(http: httpx.Client, messages: list[Body], text: str, job_id: str) -> Body:
    return ask(http, messages, reply=text + ENDED, job_id=job_id)


def crowd(http: httpx.Client, first: int) -> None:
    """Sends other requests, which use the unpinned part of the pool."""
    for start in range(first, first + 4):
        prompt = [(start * 37 + i) % 400 for i in range(450)]
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 12}).raise_for_status()


def turns_of(http: httpx.Client, job_id: str) -> list[Body]:
    """Runs two turns that call a tool and one that answers, with other requests between them."""
    messages = [user(f"{job_id}: " + " ".join(TOLD))]
    turns = []
    for number, text in enumerate(SAID):
        turns.append(call_turn(http, messages, text, job_id))
        messages = after(messages, turns[-1])
        crowd(http, 5 * number)
    turns.append(ask(http, messages, job_id=job_id, max_tokens=40, ignore_eos=True, temperature=0))
    return turns


def served(model: Path, *flags: str) -> tuple[list[Body], float]:
    """Returns the turns of a job, and the number of tokens loaded from the host tier."""
    with (
        running_server(model, *FLAGS, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        turns = turns_of(http, "one")
        loaded = counter(http, "continuum:host_kv_loaded_tokens_total") if HOST[0] in flags else 0.0
        assert server.interrupt() == 0  # Completes the trace.
    return turns, loaded


def said(turn: Body) -> Any:
    message = turn["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"], calls, turn["choices"][0]["finish_reason"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), HOST, ("--async-scheduling",)], ids=["pinned", "host", "async"])
def test_a_return_finds_what_was_verified(more: tuple[str, ...], model_folder: Path, tmp_path: Path) -> None:
    """The next turn finds all full blocks of the one before, from its pin or from the host tier; answers
    equal those of a server without drafts."""
    trace = str(tmp_path / "trace.jsonl")
    drafted, loaded = served(model_folder, *SUFFIX, "--trace", trace, *more)
    plain, _ = served(model_folder, *more)
    assert [said(turn) for turn in drafted] == [said(turn) for turn in plain]
    for before, turn in pairwise(drafted):
        told, earlier = receipt(turn), receipt(before)
        assert 0 < earlier["accepted_tokens"] < earlier["drafted_tokens"]
        computed = before["usage"]["total_tokens"] - 1
        assert told["cached_tokens"] == computed // BLOCK * BLOCK
        if more != HOST:
            assert told["previous_pin"] == "handed_over"
            assert told["cached_tokens"] == earlier["pinned_tokens"]
    assert (loaded > 0) == (more == HOST)
    assert main(["trace", "validate", trace]) == 0
    assert main(["trace", "replay", trace]) == 0
