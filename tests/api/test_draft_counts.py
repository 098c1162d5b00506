"""Receipts, ``/metrics`` and the trace report the same draft counts; each draft is counted once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from tests.api.server import Server, running_server
from tests.processes.crowd import metric, until_metric

FLAGS = (
    *("--device", "cpu", "--scheduling-policy", "continuum", "--num-gpu-blocks-override", "40"),
    *("--max-model-len", "300", "--dtype", "float32"),
)
SUFFIX = (
    "--speculative-config",
    '{"method": "suffix", "num_speculative_tokens": 6, "weigh_costs": false}',
)
NUM_PLACES = 6
SAID = list(range(60, 76))
"""Tokens that prompts contain and answers repeat."""
CHOICE = "left right left right left right"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
Answer = dict[str, Any]


def saying_again(prompt: list[int], times: int, **more: Any) -> dict[str, Any]:
    """A turn that repeats a text of its prompt."""
    return {"prompt": [*prompt, *SAID * 2], "replay_token_ids": SAID * times, "ignore_eos": True, **more}


def bodies() -> list[dict[str, Any]]:
    """Turns that are drafted well, badly, twice at a time, and past a stop string."""
    sampled = {"temperature": 0.8, "seed": 3, "max_tokens": 40, "allowed_token_ids": SAID, "ignore_eos": True}
    return [
        saying_again([], 4, job_id="again"),
        {"prompt": SAID * 3, "job_id": "sampled", **sampled},
        {"prompt": SAID * 2, "job_id": "two", "n": 2, **sampled},
        saying_again([7], 4, job_id="stopped", stop=["STOP"]),
        {"prompt": SAID, "job_id": "grammar", "structured_outputs": {"choice": [CHOICE]}, "temperature": 0},
        *(saying_again([9 + i] * 90, 9, job_id=f"crowd {i}") for i in range(4)),
    ]


async def ask(url: str, sent: list[dict[str, Any]]) -> list[Answer]:
    """Sends all at once, so that some are preempted; the client of one more request disconnects."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in sent))
        leaving = saying_again([5], 12, job_id="left", stream=True)
        async with http.stream("POST", "/v1/completions", json=leaving) as stream:
            async for line in stream.aiter_lines():
                if line:
                    break
    assert [answer.status_code for answer in answers] == [200] * len(sent), [each.text for each in answers]
    return [answer.json() for answer in answers]


def stop_text(http: httpx.Client) -> str:
    """The text of the third repeated token."""
    text = http.post("/detokenize", json={"tokens": SAID[2:3]}).json()["prompt"]
    assert text
    return str(text)


def counted(receipts: list[dict[str, Any]], name: str) -> int:
    return sum(receipt.get(name, 0) for receipt in receipts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_front_ends", "more"), [(1, ()), (2, ()), (1, ("--async-scheduling",))], ids=["1", "2", "async"]
)
def test_receipts_metrics_and_trace_count_each_draft_once(
    num_front_ends: int,
    more: tuple[str, ...],
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The counts agree for any number of API server processes, with n, a stop string, a grammar and
    preemptions."""
    trace = str(tmp_path / "trace.jsonl")
    flags = (*FLAGS, *SUFFIX, "--api-server-count", str(num_front_ends), "--trace", trace, *more)
    with running_server(model_folder, *flags) as server, client_of(server) as http:
        assert metric(http, DRAFTS) == metric(http, BY_PLACE) == 0
        assert http.get("/metrics").text.count(BY_PLACE + "{") == NUM_PLACES
        sent = bodies()
        sent[3]["stop"] = [stop_text(http)]
        answers = asyncio.run(ask(server.url, sent))
        until_metric(http, "vllm:num_requests_running", 0)
        assert metric(http, "vllm:num_preemptions_total") > 0
        check_receipts(answers)
        check_metrics(http, [answer["usage"]["receipt"] for answer in answers])
        drafts, drafted, accepted = (metric(http, name) for name in (DRAFTS, DRAFTED, ACCEPTED))
        by_place = [metric(http, BY_PLACE, position=str(place)) / drafts for place in range(NUM_PLACES)]
        assert server.interrupt() == 0
    assert main(["trace", "validate", trace]) == 0
    assert main(["trace", "replay", trace]) == 0
    told = of_trace(["summary", trace, "--json"], capsys)["drafts"]
    assert (told["num_drafts"], told["drafted_tokens"], told["accepted_tokens"]) == (
        drafts,
        drafted,
        accepted,
    )
    assert told["accepted_by_place"] == pytest.approx(by_place)
    jobs = {job["job_id"]: job for job in of_trace(["jobs", trace, "--json"], capsys)}
    for body, answer in zip(sent, answers, strict=True):
        receipt, job = answer["usage"]["receipt"], jobs[body["job_id"]]
        assert job["drafted_tokens"] == receipt["drafted_tokens"]
        assert job["accepted_tokens"] == receipt["accepted_tokens"]
    assert main(["trace", "summary", trace]) == 0
    assert f"{told['tokens_per_step']:.2f} output tokens per step of a request" in capsys.readouterr().out
    assert main(["trace", "jobs", trace]) == 0
    assert "tok/step" in capsys.readouterr().out
    steps = answers[0]["usage"]["receipt"]["output_steps"]
    assert main(["trace", "explain", trace, "again"]) == 0
    assert f"It answered in {steps} steps:" in " ".join(capsys.readouterr().out.split())
    page = tmp_path / "report.html"
    assert main(["trace", "report", trace, "--out", str(page)]) == 0
    assert f"{told['tokens_per_step']:.2f} a step of a request" in page.read_text()


def client_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def of_trace(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the JSON output of ``continuum trace``."""
    capsys.readouterr()
    assert main(["trace", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def check_receipts(answers: list[Answer]) -> None:
    """Checks that steps plus accepted tokens give the answer's tokens, or at least as many after a stop
    string."""
    for answer in answers:
        receipt, num_tokens = answer["usage"]["receipt"], answer["usage"]["completion_tokens"]
        num_of_core = receipt["output_steps"] + receipt["accepted_tokens"]
        if answer["choices"][0]["finish_reason"] == "stop":
            assert num_of_core >= num_tokens
        else:
            assert num_of_core == num_tokens
        assert receipt["drafted_tokens"] >= receipt["accepted_tokens"]
    again, sampled, two, stopped = (answer["usage"]["receipt"] for answer in answers[:4])
    assert again["output_steps"] < 64 / 3
    assert answers[3]["choices"][0]["finish_reason"] == "stop"
    assert stopped["output_steps"] < 64 / 3
    assert 0 < sampled["accepted_tokens"] < sampled["drafted_tokens"]
    assert two["output_steps"] > 40 - sampled["accepted_tokens"], "the steps of both answers"


def check_metrics(http: httpx.Client, receipts: list[dict[str, Any]]) -> None:
    """Checks metrics against receipts; the aborted turn has no receipt but its few steps are counted."""
    by_place = [metric(http, BY_PLACE, position=str(place)) for place in range(NUM_PLACES)]
    drafts, drafted, accepted = (metric(http, name) for name in (DRAFTS, DRAFTED, ACCEPTED))
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
    assert drafts >= by_place[0]
    assert drafts <= drafted <= NUM_PLACES * drafts
    assert 0 <= drafted - counted(receipts, "drafted_tokens") <= 12 * len(SAID)
    assert 0 <= accepted - counted(receipts, "accepted_tokens") <= 12 * len(SAID)


@pytest.mark.slow
def test_a_server_without_drafts_has_no_series_of_them(model_folder: Path) -> None:
    """A server without drafts exports no draft series, and its receipts count one step per token."""
    with running_server(model_folder, *FLAGS) as server, client_of(server) as http:
        usage = http.post("/v1/completions", json=saying_again([], 2, job_id="a")).json()["usage"]
        assert usage["receipt"]["output_steps"] == usage["completion_tokens"] == 32
        assert usage["receipt"]["drafted_tokens"] == 0
        assert "spec_decode" not in http.get("/metrics").text
