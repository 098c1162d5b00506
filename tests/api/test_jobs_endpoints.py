"""Promises about jobs over HTTP: naming one is optional, its status can be read, and clients may send signals
about their tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.api.server import running_server
from tests.api.test_chat import CALL_TEXT, TOOL, token_ids

Body = dict[str, Any]
CHAT = "/v1/chat/completions"


def ask(http: httpx.Client, messages: list[Body], *, reply: str | None = None, **request: Any) -> Body:
    """Sends a turn; ``reply`` forces what the model says. ``headers`` and body fields as given."""
    headers = request.pop("headers", {})
    said: Body = {"replay_token_ids": token_ids(http, reply)} if reply is not None else {"max_tokens": 4}
    body = {"messages": messages, "tools": [TOOL], **said, **request}
    response = http.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer: Body = response.json()
    return answer


def user(text: str) -> Body:
    return {"role": "user", "content": f"{text}: list the files, please, all of them that there are"}


def after(messages: list[Body], answer: Body, result: str = "a.txt\nb.txt") -> list[Body]:
    """The conversation with the model's call and the tool's result."""
    message = answer["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    return [*messages, message, {"role": "tool", "tool_call_id": call_id, "content": result}]


def call(http: httpx.Client, text: str, **request: Any) -> tuple[list[Body], Body]:
    """Runs a first turn that calls a tool; returns the conversation with the result, and the answer."""
    messages = [user(text)]
    answer = ask(http, messages, reply=CALL_TEXT + "<|im_end|>", **request)
    return after(messages, answer), answer


def receipt(answer: Body) -> Body:
    found: Body = answer["usage"]["receipt"]
    return found


def job(http: httpx.Client, job_id: str) -> Body:
    response = http.get(f"/v1/jobs/{quote(job_id, safe='')}")
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


def signal(http: httpx.Client, job_id: str, **body: Any) -> Body:
    response = http.post(f"/v1/jobs/{quote(job_id, safe='')}/signals", json=body)
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


def counter(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


# ---- unnamed jobs ----


def test_a_job_that_nobody_names_is_held_and_found(http: httpx.Client) -> None:
    """Without any id, the second turn's cached tokens cover the first one's prompt and reply."""
    messages, one = call(http, "no name")
    assert receipt(one)["job_id"].startswith("inferred-")
    assert receipt(one)["pinned_tokens"] > 0
    two = ask(http, messages)
    assert receipt(two)["job_id"] == receipt(one)["job_id"]
    assert (receipt(two)["turn"], receipt(two)["previous_pin"]) == (2, "handed_over")
    assert (
        two["usage"]["prompt_tokens_details"]["cached_tokens"]
        == (one["usage"]["total_tokens"] - 1) // 16 * 16
    )
    status = job(http, receipt(one)["job_id"])
    assert (status["inferred"], status["turns"]) == (True, 2)


def test_a_single_question_holds_nothing(http: httpx.Client) -> None:
    """After the answer of a single question none of its blocks stay pinned."""
    answer = ask(http, [user("just asking")], reply="It is blue.<|im_end|>")
    assert (receipt(answer)["pinned_tokens"], receipt(answer)["ttl_s"]) == (0, 0.0)
    status = job(http, receipt(answer)["job_id"])
    assert (status["pinned_blocks"], status["ttl_s"]) == (0, None)


def test_another_question_with_the_same_tools_is_another_job(http: httpx.Client) -> None:
    """Two prompts with a hundred common first tokens belong to different jobs."""
    messages, one = call(http, "first of two")
    _, other = call(http, "second of two, which asks for something else")
    assert receipt(other)["job_id"] != receipt(one)["job_id"]
    assert receipt(ask(http, messages))["job_id"] == receipt(one)["job_id"]


@pytest.mark.parametrize(
    ("headers", "body", "job_id"),
    [
        ({"X-Session-ID": "by-header"}, {}, "by-header"),
        ({"X-Claude-Code-Session-Id": "claude"}, {}, "claude"),
        ({"session_id": "codex"}, {}, "codex"),
        ({"x-opencode-session": "opencode"}, {}, "opencode"),
        ({"X-Correlation-ID": "aiperf"}, {}, "aiperf"),
        ({}, {"session_id": "body"}, "body"),
        ({}, {"prompt_cache_key": "thread"}, "thread"),
        ({}, {"metadata": {"user_id": "user_1_account__session_abc-1"}}, "abc-1"),
        ({"X-Session-ID": "later"}, {"job_id": "first"}, "first"),
    ],
)
def test_what_clients_send_names_the_job(
    http: httpx.Client, headers: dict[str, str], body: Body, job_id: str
) -> None:
    """The receipt names the job that the turn was assigned to."""
    answer = ask(http, [user(job_id)], headers=headers, **body)
    assert receipt(answer)["job_id"] == job_id


def test_two_sub_agents_under_one_header_keep_their_own_kv(http: httpx.Client) -> None:
    """Two sub-agents that alternate in one session each find everything they had computed."""
    headers = {"X-Claude-Code-Session-Id": "two agents"}
    agents = {name: call(http, f"agent {name}", headers=headers) for name in ("main", "sub")}
    status = job(http, "two agents")
    assert (status["turns"], len(status["branches"])) == (2, 2)
    for messages, _ in agents.values():
        two = ask(http, messages, headers=headers)
        assert receipt(two)["recomputed_tokens"] == 0
        assert receipt(two)["previous_pin"] == "handed_over"
        assert receipt(two)["diverged_at_token"] is None


@pytest.mark.parametrize(
    ("parent", "of_parent", "child", "of_child"),
    [
        ("run", {"parent": {}}, "sub", {}),
        ("cc", {"X-Claude-Code-Session-Id": "cc"}, "cc/7", {"X-Claude-Code-Agent-Id": "7"}),
        ("t-1", {"session-id": "t-1"}, "t-2", {"thread-id": "t-2", "x-codex-parent-thread-id": "t-1"}),
        ("o-1", {"X-Session-Id": "o-1"}, "o-2", {"X-Session-Id": "o-2", "x-parent-session-id": "o-1"}),
    ],
)
def test_a_sub_agent_is_a_job_with_a_parent(
    http: httpx.Client, parent: str, of_parent: Body, child: str, of_child: Body
) -> None:
    """Both go on by themselves with all they had computed, and each names the other."""
    said: list[Body] = [{"headers": of_parent}, {"headers": {**of_parent, **of_child}}]
    if not of_child:
        said = [{"job_id": parent}, {"job_id": child, "parent_job_id": parent}]
    agents = [call(http, f"agent {number} of {parent}", **said[number]) for number in (0, 1)]
    assert job(http, child)["parent"] == parent
    assert job(http, parent)["children"] == [child]
    assert job(http, parent)["parent"] is None
    for (messages, _), how, name in zip(agents, said, (parent, child), strict=True):
        two = receipt(ask(http, messages, **how))
        assert (two["job_id"], two["turn"], two["recomputed_tokens"]) == (name, 2, 0)
    assert http.post(f"/v1/jobs/{parent}/finish").status_code == 200
    assert http.get(f"/v1/jobs/{child}").status_code == 404, "nobody waits for it any more"


def test_a_job_tells_what_it_has_used(http: httpx.Client) -> None:
    """The sum of its answers' usage, to the token."""
    messages, one = call(http, "what will it cost", job_id="billed")
    two = ask(http, messages, job_id="billed")
    usages = [answer["usage"] for answer in (one, two)]
    told = job(http, "billed")["usage"]
    assert told["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert told["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert told["cached_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert told["cached_tokens"] > 0


def test_a_prompt_that_parts_from_its_job_is_told_where(http: httpx.Client) -> None:
    """If the first message was rewritten, receipt and metrics report what that cost."""
    before = counter(http, "continuum:prompt_divergences_total")
    lost = counter(http, "continuum:prompt_diverged_tokens_total")
    messages, _ = call(http, "one way to say it", job_id="parting")
    two = ask(http, [user("another way to say it"), *messages[1:]], job_id="parting")
    told = receipt(two)
    assert told["diverged_at_token"] is not None
    assert told["diverged_at_token"] % 16 == 0
    assert told["cached_tokens"] <= told["diverged_at_token"]
    assert told["diverged_tokens"] > 0
    assert counter(http, "continuum:prompt_divergences_total") == before + 1
    assert counter(http, "continuum:prompt_diverged_tokens_total") == lost + told["diverged_tokens"]


def test_several_prompts_of_one_request_add_up(http: httpx.Client) -> None:
    """A request with several prompts gets one receipt with the sums."""
    body = {"prompt": ["one " * 40, "two " * 40], "max_tokens": 2, "job_id": "several"}
    answer = http.post("/v1/completions", json=body).json()
    assert receipt(answer)["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert receipt(answer)["request_id"] == answer["id"]


# ---- status of jobs ----


def test_jobs_are_listed_newest_first(http: httpx.Client) -> None:
    """Jobs are listed newest first, up to the requested number."""
    for name in ("list-1", "list-2", "list-3"):
        ask(http, [user(name)], job_id=name)
    ids = [each["id"] for each in http.get("/v1/jobs", params={"limit": 2}).json()["data"]]
    assert ids == ["list-3", "list-2"]
    assert len(http.get("/v1/jobs").json()["data"]) >= 3


def test_how_many_more_jobs_fit_is_told(http: httpx.Client) -> None:
    """It follows from the needs and the blocks that are reported with it; each core of a group rounds its own
    part down."""
    ask(http, [user("capacity")], job_id="capacity")
    told = http.get("/v1/capacity").json()
    assert told["object"] == "capacity"
    assert told["waiting_jobs"] == 0
    assert told["ahead_s"] == sorted(told["ahead_s"])
    assert len(told["ahead_s"]) == len(told["needed_blocks"]) == len(told["usual_blocks"])
    left = [told["usable_blocks"] - needed for needed in told["needed_blocks"]]
    fits = min(blocks / usual for blocks, usual in zip(left, told["usual_blocks"], strict=True) if usual)
    assert int(fits) - 1 <= told["jobs_that_fit"] <= int(fits)
    assert told["jobs_that_fit"] > 0


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1e3", "9" * 5000, ""])
def test_an_odd_limit_is_refused(http: httpx.Client, limit: str) -> None:
    """An invalid limit is refused in one sentence that names the field."""
    response = http.get("/v1/jobs", params={"limit": limit})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


def test_a_job_tells_what_is_held_for_it_and_until_when(http: httpx.Client) -> None:
    """A job's status has its turns, tools, pinned blocks, their time left, and the tenant."""
    _, one = call(http, "status", job_id="status", user="ann")
    status = job(http, "status")
    assert (status["id"], status["tenant"], status["inferred"]) == ("status", "ann", False)
    assert (status["turns"], status["open_turns"]) == (1, [])
    (tip,) = status["branches"]
    assert tip["request_id"] == one["id"]
    assert tip["tools"] == ["bash/ls"]
    assert tip["pinned_blocks"] * 16 == receipt(one)["pinned_tokens"]
    assert status["pinned_blocks"] == tip["pinned_blocks"]
    assert 0 < status["ttl_s"] <= receipt(one)["ttl_s"]


@pytest.mark.parametrize("job_id", ["a/b/c", "/", "задача №1", "a?b#c%d", "x/signals", "...", "a b"])
def test_any_job_id_can_be_asked_about(http: httpx.Client, job_id: str) -> None:
    """A job id may contain any characters, encoded in the path."""
    call(http, "odd id", job_id=job_id)
    assert job(http, job_id)["id"] == job_id
    assert signal(http, job_id, state="started", expected_s=3)["id"] == job_id
    answer = http.post(f"/v1/jobs/{quote(job_id, safe='')}/finish")
    assert (answer.status_code, answer.json()) == (200, {"id": job_id, "object": "job", "finished": True})
    assert http.get(f"/v1/jobs/{quote(job_id, safe='')}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "", None), ("POST", "/signals", {"state": "finished"}), ("POST", "/finish", None)],
)
def test_an_unknown_job_is_not_found(http: httpx.Client, method: str, path: str, body: Body | None) -> None:
    """An unknown job gives 404 with one sentence, however long the id."""
    response = http.request(method, f"/v1/jobs/{'nobody' * 100}{path}", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "job_id"
    assert len(response.text) < 600


# ---- signals of clients ----


def test_signals_move_the_time_left(http: httpx.Client) -> None:
    """Signals change the time left that GET shows: more for a longer call, none after a cancellation."""
    messages, one = call(http, "signals", job_id="signals")
    before = job(http, "signals")["ttl_s"]
    longer = signal(http, "signals", state="started", expected_s=25)
    assert longer["ttl_s"] > before + 10
    assert job(http, "signals")["ttl_s"] == pytest.approx(longer["ttl_s"], abs=5)
    assert 15 < longer["expected_return_s"] < 35
    shorter = signal(http, "signals", state="progress", fraction=0.99)
    assert shorter["ttl_s"] < longer["ttl_s"]
    finished = signal(http, "signals", state="finished", request_id=one["id"])
    assert finished["branches"][0]["told"] == "finished"
    assert finished["expected_return_s"] < 2
    two = ask(http, messages, job_id="signals", reply=CALL_TEXT + "<|im_end|>")
    assert receipt(two)["previous_pin"] == "handed_over"
    gone = signal(http, "signals", state="cancelled", tool="bash", call_id="call_1")
    assert (gone["pinned_blocks"], gone["ttl_s"]) == (0, None)


def test_a_call_that_takes_too_long_lets_the_pin_go(http: httpx.Client) -> None:
    """A call expected beyond the horizon releases the pin; the pin does not count as expired."""
    messages, _ = call(http, "too long", job_id="too long")
    told = signal(http, "too long", state="started", expected_s=4000)
    assert told["pinned_blocks"] == 0
    again = ask(http, messages, job_id="too long", reply=CALL_TEXT + "<|im_end|>")
    assert receipt(again)["previous_pin"] == "released"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "state"),
        ({"state": "sleeping"}, "state"),
        ({"state": "started", "expected_s": -1}, "expected_s"),
        ({"state": "started", "expected_s": 1e300}, "expected_s"),
        ({"state": "started", "expected_s": "soon"}, "expected_s"),
        ({"state": "progress", "fraction": 1.5}, "fraction"),
        ({"state": "progress", "remaining_s": []}, "remaining_s"),
        ({"state": "finished", "remaining_s": 5}, "remaining_s"),
        ({"state": "started", "tool": "x" * 1000}, "tool"),
        ({"state": "started", "call_id": ""}, "call_id"),
    ],
)
def test_a_wrong_signal_is_told_its_field(http: httpx.Client, body: Body, field: str) -> None:
    """An invalid signal gets 400 with its field, and the job stays unchanged."""
    call(http, "wrong signals", job_id="wrong signals")
    response = http.post("/v1/jobs/wrong signals/signals", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert job(http, "wrong signals")["branches"][0]["told"] is None


def test_a_signal_about_no_turn_is_not_found(http: httpx.Client) -> None:
    """A signal about an unknown or continued turn gets 404: no tools run for it."""
    call(http, "which turn", job_id="which turn")
    body = {"state": "finished", "request_id": "chatcmpl-never"}
    response = http.post("/v1/jobs/which turn/signals", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "request_id"


def test_a_stream_that_is_left_is_no_turn(http: httpx.Client) -> None:
    """After a disconnect the client's retry counts as the same turn of the job."""
    messages, one = call(http, "left")
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with http.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    # The disconnect may still be on its way; the test's time limit bounds the loop.
    while job(http, receipt(one)["job_id"])["open_turns"]:
        pass
    two = ask(http, messages)
    assert receipt(two)["job_id"] == receipt(one)["job_id"]
    assert receipt(two)["recomputed_tokens"] == 0


# ---- policies without jobs ----


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[httpx.Client]:
    flags = ("--num-gpu-blocks-override", "100", "--scheduling-policy", "fcfs")
    with running_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def test_a_policy_without_jobs_says_so(plain: httpx.Client) -> None:
    """All job paths give 501 in one sentence; turns are still answered, without a receipt."""
    for method, path in (("GET", ""), ("GET", "/a"), ("POST", "/a/finish")):
        response = plain.request(method, f"/v1/jobs{path}")
        assert response.status_code == 501
        assert "--scheduling-policy" in response.json()["error"]["message"]
    assert plain.get("/v1/capacity").status_code == 501
    response = plain.post("/v1/jobs/a/signals", json={"state": "started"})
    assert response.status_code == 501
    answer = plain.post(CHAT, json={"messages": [user("plain")], "max_tokens": 2, "job_id": "a"}).json()
    assert "receipt" not in answer["usage"]
    assert json.dumps(answer)
