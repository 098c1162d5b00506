"""Keys of a file: each gets what it may use and no other's, and its use is counted to the token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest

from continuum.cli.main import main
from engine.api.processes.server_group import ServerGroup
from engine.api.tenants.key_file import read_key_file
from engine.api.tenants.usage_board import UsageBoard, Used, Window
from engine.errors import ConfigError
from tests.api.server import Server, running_server
from tests.api.test_service import eventually
from tests.child_processes import children_of

CHAT = "/v1/chat/completions"
Body = dict[str, Any]

FILE = f"""
[free]
sha256 = "{sha256(b"key-of-free").hexdigest()}"
[asks]
key = "key-of-asks"
per_day = {{ requests = 3 }}
[reads]
key = "key-of-reads"
per_day = {{ prompt_tokens = 300 }}
[writes]
key = "key-of-writes"
per_day = {{ output_tokens = 10 }}
[computes]
key = "key-of-computes"
per_day = {{ computed_tokens = 400 }}
[alone]
key = "key-of-alone"
running_requests = 1
[elsewhere]
key = "key-of-elsewhere"
models = ["another"]
"""


def client(server: Server, name: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer key-of-{name}"}, timeout=60)


def ask(http: httpx.Client, words: int = 10, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "look " * words}], "max_tokens": 4, **fields}
    return http.post(CHAT, json=body)


def used(http: httpx.Client, name: str) -> Body:
    """What an owner may see of its own use."""
    (line,) = http.get("/v1/usage").json()["data"]
    assert line["key"] == name
    return dict(line)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def server(request: pytest.FixtureRequest, model: Path, keys: Path) -> Iterator[Server]:
    keys.write_text(FILE)
    flags = ("--num-gpu-blocks-override", "400", "--api-server-count", str(request.param))
    with running_server(model, *flags, "--api-key", "operator", "--api-key-file", str(keys)) as running:
        yield running


def test_more_requests_than_a_key_may_send_are_refused(server: Server) -> None:
    """The fourth gets 429, in OpenAI's form, with the headers by which clients wait."""
    with client(server, "asks") as http:
        for left in (2, 1, 0):
            answer = ask(http)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        refused = ask(http)
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= Window.DAY
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        error = refused.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"] == "This key may use 3 requests per_day, and has used 3."
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-of-asks", max_retries=0) as official,
        pytest.raises(openai.RateLimitError),
    ):
        official.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "?"}])


def test_a_prompt_beyond_the_quota_is_refused_and_costs_nothing(server: Server) -> None:
    with client(server, "reads") as http:
        usage = ask(http, 20).json()["usage"]
        assert ask(http, 200).status_code == 429
        assert used(http, "reads")["per_day"]["prompt_tokens"] == {
            "used": usage["prompt_tokens"],
            "limit": 300,
        }
        assert ask(http, 20).status_code == 200


def test_answers_count_against_the_next_request(server: Server) -> None:
    """A key may use 10 output tokens, and gets an answer of 12 whole; then it has to wait."""
    with client(server, "writes") as http:
        assert ask(http, max_tokens=12, ignore_eos=True).json()["usage"]["completion_tokens"] == 12
        assert ask(http).status_code == 429


def test_what_is_cached_is_not_computed(server: Server) -> None:
    """Five times the same prompt of 60 words fits a quota of 400 computed tokens; others do not."""
    with client(server, "computes") as http:
        asked = [ask(http, 60).json()["usage"] for _ in range(5)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in asked]
        computed = sum(usage["total_tokens"] for usage in asked) - sum(cached)
        assert used(http, "computes")["per_day"]["computed_tokens"]["used"] == computed < 400
        for number in range(3):
            ask(http, 200, messages=[{"role": "user", "content": f"{number} sees " * 80}])
        assert ask(http, 60).status_code == 429


def test_requests_at_once_are_bounded(server: Server) -> None:
    operator = httpx.Client(base_url=server.url, headers={"x-api-key": "operator"})
    with operator, client(server, "alone") as http:
        operator.post("/pause?mode=keep")
        try:
            with ThreadPoolExecutor(1) as thread:
                waiting = thread.submit(ask, http)
                assert eventually(lambda: used(http, "alone")["running_requests"] == 1)
                assert ask(http).status_code == 429
                operator.post("/resume")
                assert waiting.result().status_code == 200
        finally:
            operator.post("/resume")
        assert eventually(lambda: used(http, "alone")["running_requests"] == 0)
        assert ask(http).status_code == 200


def test_a_prompt_counts_as_computed_though_its_client_leaves(server: Server) -> None:
    with client(server, "free") as http:
        before = used(http, "free")["total"]
        body = {"prompt": "a prompt that nobody has sent " * 9, "max_tokens": 500, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert next(line for line in answer.iter_lines() if line.startswith("data: "))
        assert eventually(lambda: used(http, "free")["running_requests"] == 0)
        after = used(http, "free")["total"]
    grown = {name: after[name] - before[name] for name in after}
    assert grown["requests"] == 1
    assert grown["computed_tokens"] == grown["prompt_tokens"] + grown["output_tokens"]
    assert 0 < grown["output_tokens"] < 500


def test_a_key_is_for_its_models(server: Server) -> None:
    with client(server, "elsewhere") as http:
        answer = ask(http)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "This key may use another."


def test_an_operator_sees_all_and_an_owner_its_own(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers={"x-api-key": "operator"}) as http:
        names = [line["key"] for line in http.get("/v1/usage").json()["data"]]
    assert names == ["free", "asks", "reads", "writes", "computes", "alone", "elsewhere"]


def test_a_flood_of_one_key_is_refused_and_others_are_not(server: Server) -> None:
    with client(server, "asks") as flood, client(server, "free") as quiet, ThreadPoolExecutor(9) as threads:
        floods = [threads.submit(ask, flood) for _ in range(60)]
        answers = [threads.submit(ask, quiet) for _ in range(6)]
        assert {done.result().status_code for done in answers} == {200}
        assert {done.result().status_code for done in floods} <= {200, 429}


@pytest.mark.slow
def test_counts_are_exact_over_all_ways_to_ask(server: Server) -> None:
    """Random requests of one key through random connections; with several API server processes one of them
    is killed in the middle, between requests."""
    random = Random(3)
    with client(server, "free") as http:
        before = used(http, "free")["total"]
    expected = dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "computed_tokens"), 0)
    for number in range(24):
        with client(server, "free") as http:
            if number == 12:
                kill_one(server)
            n, count = random.choice((1, 1, 2)), random.randrange(1, 6)
            if random.random() < 0.5:
                usage = ask(http, random.randrange(1, 90), n=n, max_tokens=count).json()["usage"]
                num_prompts = 1
            else:
                prompts = [f"{random.randrange(3)} " + "file " * random.randrange(1, 60) for _ in range(2)]
                body = {"prompt": prompts, "n": n, "max_tokens": count}
                usage = http.post("/v1/completions", json=body).json()["usage"]
                num_prompts = 2
        expected["requests"] += n * num_prompts
        expected["prompt_tokens"] += usage["prompt_tokens"]
        expected["output_tokens"] += usage["completion_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        expected["computed_tokens"] += usage["total_tokens"] - cached
    with client(server, "free") as http:
        after = used(http, "free")["total"]
        page = http.get("/metrics").text
    for name, count in after.items():
        assert f'continuum:key_{name}_total{{key="free",model_name="tiny"}} {float(count)}' in page
    assert {name: after[name] - before[name] for name in expected} == expected


def kill_one(server: Server) -> None:
    """Kills an API server process, if there are several, and waits for the one in its place."""
    processes = children_of(server.process.pid, "from engine.api.processes.api_server import")
    if processes:
        os.kill(processes[0], signal.SIGKILL)
        assert eventually(
            lambda: processes[0] not in (now := api_servers(server)) and len(now) == len(processes), 30
        )


def api_servers(server: Server) -> list[int]:
    return children_of(server.process.pid, "from engine.api.processes.api_server import")


def test_the_file_is_read_again_while_the_server_runs(server: Server, keys: Path) -> None:
    """A wrong file changes nothing; a right one adds and removes keys and moves limits. Use stays counted."""
    with client(server, "asks") as http:
        keys.write_text(FILE + "\n[wrong]\nkey = 7\n")
        os.kill(server.process.pid, signal.SIGHUP)
        assert ask(http).status_code == 429
        keys.write_text(
            '[asks]\nkey = "key-of-asks"\nper_day = { requests = 1000 }\n[new]\nkey = "key-of-new"\n'
        )
        os.kill(server.process.pid, signal.SIGHUP)
        assert eventually(lambda: all_accept(server, "asks"))
        assert used(http, "asks")["per_day"]["requests"]["used"] > 3
    assert eventually(lambda: all_accept(server, "new"))
    with client(server, "reads") as http:
        assert ask(http).status_code == 401
    keys.write_text(FILE)
    os.kill(server.process.pid, signal.SIGHUP)


def all_accept(server: Server, name: str) -> bool:
    """Whether the next few connections are served, whichever process accepts them."""
    for _ in range(8):
        with client(server, name) as http:
            if ask(http, max_tokens=1).status_code != 200:
                return False
    return True


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "must have from 1 to 1024 keys, got 0"),
        ('[a]\nkey = "x"\nper_day = { tokens = 3 }', "unknown field `tokens`"),
        ('[a]\nkey = "x"\nper_day = { requests = -1 }', "`$[...].per_day.requests`"),
        ("[a]", "'a' needs either key or sha256"),
        ('[a]\nkey = " "', "'a': key must not be empty"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "'b' and 'a' have the same secret"),
        ('["a b"]\nkey = "x"', "'a b' is not a valid name"),
        ('[a]\nsha256 = "x"', "sha256"),
        ('[a]\nkey = "x"\nservice_tier = "fastest"', "service_tier"),
        ("[a", "api_key_file"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(content: str, said: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_key_file(str(path))
    assert said in str(error.value)
    assert main(["serve", str(model), "--api-key-file", str(path)]) == 2


def test_a_file_may_not_repeat_a_key_of_the_command_line(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "x"\n')
    for given in ("alice:other", "bob:x", "x"):
        assert main(["serve", str(model), "--api-key", given, "--api-key-file", str(path)]) == 2


# ---- the counters ----


@pytest.mark.parametrize("count", [1, 3])
def test_windows_begin_at_zero_and_rows_add_up(count: int, tmp_path: Path) -> None:
    """Random counts of several processes at random times, against sums; a process that restarts goes on."""
    random = Random(count)
    folder = tmp_path if count > 1 else None
    groups = [ServerGroup(index, count, folder) for index in range(count)]
    boards = [UsageBoard(group) for group in groups]
    counted: list[tuple[str, Used, int, float]] = []
    now = 1_700_000_000.0
    for _ in range(400):
        now += random.choice((0.0, 1.0, 25.0, 4000.0))
        index = random.randrange(count)
        if count > 1 and random.random() < 0.05:
            boards[index] = UsageBoard(groups[index])
        name, what, number = random.choice("abc"), random.choice(list(Used)), random.randrange(9)
        board = boards[index]
        board.add(board.slot_of(name), what, number, now)
        counted.append((name, what, number, now))
        seen = random.choice(boards)
        for window in Window:
            expected = sum(
                each[2] for each in counted if each[:2] == (name, what) and each[3] // window == now // window
            )
            assert seen.in_window(seen.slot_of(name), window, what, now) == expected
        total = sum(each[2] for each in counted if each[:2] == (name, what))
        assert seen.total(seen.slot_of(name), what) == total


def test_what_a_dead_process_ran_has_ended(tmp_path: Path) -> None:
    first, second = (UsageBoard(ServerGroup(index, 2, tmp_path)) for index in range(2))
    slot = first.slot_of("a")
    first.run(slot, 3)
    second.run(second.slot_of("a"), 2)
    assert second.running(slot) == 5
    again = UsageBoard(ServerGroup(0, 2, tmp_path))
    assert again.running(again.slot_of("a")) == 2
