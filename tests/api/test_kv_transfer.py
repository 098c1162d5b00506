"""KV transfer from a prefill server to a decode server, as a proxy of vLLM uses it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, running_server
from tests.processes.event_subscriber import free_ports
from tests.worker.kv_transfer import NEEDS_NIXL

BLOCK = 16
FLAGS = ("--num-gpu-blocks-override", "100", "--max-model-len", "480", "--device", "cpu")
ORDER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None, "remote_host": None}
"""What vLLM's proxies send to the prefill server."""
WAIT_S = 10.0


def config(
    role: str,
    port: int,
    lease_s: float = 30.0,
    policy: str = "recompute",
    connector: str = "TCPConnector",
) -> str:
    return json.dumps(
        {
            "kv_connector": connector,
            "kv_role": role,
            "kv_port": port,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"lease_s": lease_s, "allowed_ports": ["1024-65535"]},
        }
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill server and a decode server."""

    first: Server
    second: Server
    folder: Path

    def traces(self) -> list[Path]:
        return [self.folder / "first.jsonl", self.folder / "second.jsonl"]

    def hand_over(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Does what a proxy does with a client's request; returns the second server's answer."""
        return post(self.second, path, {**body, "kv_transfer_params": self.prefill(path, body)})

    def prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Runs the prefill; returns the params for the second server."""
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        one_token = {**body, limit: 1, "stream": False, "kv_transfer_params": ORDER}
        params: dict[str, Any] = post(self.first, path, one_token)["kv_transfer_params"]
        return params

    def num_leases(self) -> int:
        return int(gauge(self.first, "continuum:pins"))


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def refusal(server: Server, params: dict[str, Any]) -> str:
    body = {"prompt": [1, 2, 3], "kv_transfer_params": params}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def gauge(server: Server, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    lines = httpx.get(server.url + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def two_free_ports() -> int:
    """The first of two consecutive free ports."""
    while True:
        (port,) = free_ports(1)
        with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(check: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"


@contextmanager
def running_pair(
    model: Path,
    folder: Path,
    *flags: str,
    lease_s: float = 30.0,
    policy: str = "recompute",
    connector: str = "TCPConnector",
) -> Iterator[Pair]:
    first_port, second_port = free_ports(2)
    options = lease_s, policy, connector
    first = (*FLAGS, *flags, "--kv-transfer-config", config("kv_producer", first_port, *options))
    second = (*FLAGS, *flags, "--kv-transfer-config", config("kv_consumer", second_port, *options))
    with (
        running_server(model, *first, "--trace", str(folder / "first.jsonl")) as one,
        running_server(
            model, *second, "--trace", str(folder / "second.jsonl"), log=folder / "second.log"
        ) as other,
    ):
        yield Pair(one, other, folder)


CONNECTORS = [
    "TCPConnector",
    pytest.param("NixlConnector", marks=NEEDS_NIXL),
]


@pytest.fixture(scope="module", params=CONNECTORS)
def pair(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(model_folder, folder, connector=request.param) as running:
        yield running
        assert running.first.interrupt() == running.second.interrupt() == 0
        for trace in running.traces():
            assert main(["trace", "replay", str(trace)]) == 0, "every decision is made again"


def completion(seed: int, num_tokens: int = 200) -> dict[str, Any]:
    prompt = [(seed * 31 + i * 7) % 400 + 1 for i in range(num_tokens)]
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def cached_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


def test_a_completion_goes_on(pair: Pair) -> None:
    """The text equals that of one server, all full blocks of the prompt are fetched, and the lease ends."""
    body = completion(1)
    params = pair.prefill("/v1/completions", body)
    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == 192
    assert len(params["remote_block_ids"][0]) == 12
    assert params["tp_size"] == 1
    answer = post(pair.second, "/v1/completions", {**body, "kv_transfer_params": params})
    assert cached_tokens(answer) == 192
    assert answer["choices"][0]["text"] == post(pair.first, "/v1/completions", body)["choices"][0]["text"]
    wait_until(lambda: pair.num_leases() == 0)


def test_chat_and_responses_go_on(pair: Pair) -> None:
    """OpenAI's SDK passes the params on; the second turn finds the first one's KV on the second server, which
    holds the job's pins."""
    text = "Read the file, then tell me what it says about the weather in the north. " * 2
    messages = [{"role": "user", "content": text}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "job_id": "a-job"}
    params = pair.prefill("/v1/chat/completions", chat)
    client = openai.OpenAI(base_url=pair.second.url + "/v1", api_key="none")
    create: Any = client.chat.completions.create  # its overloads want each message's own type
    stream = create(
        model="tiny",
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kv_transfer_params": params, "job_id": "a-job"},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    num_prompt_tokens = usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == (num_prompt_tokens - 1) // BLOCK * BLOCK
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    again = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    following = post(pair.second, "/v1/chat/completions", {**chat, "messages": again})
    assert cached_tokens(following) >= num_prompt_tokens // BLOCK * BLOCK

    response = {"model": "tiny", "input": text + "Once more.", "max_output_tokens": 8, "temperature": 0}
    answer = pair.hand_over("/v1/responses", response)
    assert cached_tokens(answer) > 0


def test_a_stream_tells_the_params(pair: Pair) -> None:
    """A proxy that streams from the first server gets the params in a separate last chunk."""
    body = {**completion(2), "max_tokens": 1, "stream": True, "kv_transfer_params": ORDER}
    with httpx.stream("POST", pair.first.url + "/v1/completions", json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    params = json.loads(lines[-1])["kv_transfer_params"]
    assert cached_tokens(post(pair.second, "/v1/completions", completion(2) | {"kv_transfer_params": params}))


def test_answers_side_by_side_read_one_lease(pair: Pair) -> None:
    body = completion(3)
    answer = post(
        pair.second,
        "/v1/completions",
        {**body, "n": 3, "kv_transfer_params": pair.prefill("/v1/completions", body)},
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [texts[0]] * 3
    assert cached_tokens(answer) == 192
    wait_until(lambda: pair.num_leases() == 0)


def test_a_lease_is_read_once(pair: Pair) -> None:
    """Used params refer to an ended lease: the prompt is recomputed and the text is the same."""
    body = completion(4)
    params = pair.prefill("/v1/completions", body)
    texts = []
    for _ in range(2):
        answer = post(pair.second, "/v1/completions", {**body, "kv_transfer_params": params})
        texts.append(answer["choices"][0]["text"])
        httpx.post(pair.second.url + "/reset_prefix_cache", timeout=60).raise_for_status()
        wait_until(lambda: pair.num_leases() == 0)
    assert texts[0] == texts[1]
    assert cached_tokens(answer) == 0


def test_an_abort_gives_the_lease_back(pair: Pair) -> None:
    body = completion(5)
    params = pair.prefill("/v1/completions", body)
    assert pair.num_leases() == 1
    endless = {**body, "max_tokens": 250, "stream": True, "kv_transfer_params": params}
    with httpx.stream("POST", pair.second.url + "/v1/completions", json=endless, timeout=60):
        pass
    wait_until(lambda: pair.num_leases() == 0)


def test_what_is_wrong_is_said(pair: Pair) -> None:
    assert "cannot both be on" in refusal(pair.first, {"do_remote_decode": True, "do_remote_prefill": True})
    assert "needs remote_request_id" in refusal(pair.second, {"do_remote_prefill": True})
    elsewhere = {
        "do_remote_prefill": True,
        "remote_request_id": 32 * "0",
        "remote_host": "169.254.169.254",
        "remote_port": 5600,
        "remote_num_tokens": 64,
    }
    assert "allowed_peers" in refusal(pair.second, elsewhere)
    assert "remote_port" in refusal(pair.second, {**elsewhere, "remote_port": "eighty"})
    for port in (0, 80, 1023, 70_000):
        assert "allowed_ports" in refusal(pair.second, {**elsewhere, "remote_port": port})
    for lease in ("x\r\nFLUSHALL\r\n", "a" * 31, "A" * 32, ""):
        told = refusal(pair.second, {**elsewhere, "remote_request_id": lease})
        assert "32 hexadecimal digits" in told
    assert "remote_num_tokens" in refusal(pair.second, {**elsewhere, "remote_num_tokens": -1})
    loopback = {**elsewhere, "remote_host": "127.0.0.1", "remote_lease_s": float("nan")}
    text = json.dumps({"prompt": [1, 2, 3], "kv_transfer_params": loopback})
    headers = {"content-type": "application/json"}
    answer = httpx.post(pair.second.url + "/v1/completions", content=text, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "does not lease KV" in refusal(pair.second, ORDER)
    assert "fetches no KV" in refusal(pair.first, elsewhere)
    for body in ({**completion(6), "n": 2}, {**completion(6), "prompt": ["a", "b"]}):
        body["kv_transfer_params"] = ORDER
        assert httpx.post(pair.first.url + "/v1/completions", json=body, timeout=60).status_code == 400


@pytest.mark.slow
def test_a_lease_ends_by_itself(model_folder: Path, tmp_path: Path) -> None:
    """An unread lease ends by time while the server is idle; a waiting reader renews it."""
    with running_pair(model_folder, tmp_path, "--max-num-seqs", "1", lease_s=3.0) as pair:
        body = completion(1)
        params = pair.prefill("/v1/completions", body)
        wait_until(lambda: pair.num_leases() == 0)
        answer = post(pair.second, "/v1/completions", {**body, "kv_transfer_params": params})
        assert cached_tokens(answer) == 0

        long = {**completion(2), "max_tokens": 270, "stream": True}
        with httpx.stream("POST", pair.second.url + "/v1/completions", json=long, timeout=60) as running:
            lines = running.iter_lines()
            next(lines)
            params = pair.prefill("/v1/completions", completion(3))
            late = post(pair.second, "/v1/completions", {**completion(3), "kv_transfer_params": params})
            assert cached_tokens(late) == 192


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "connector"),
    [
        ("recompute", "TCPConnector"),
        ("fail", "TCPConnector"),
        pytest.param("recompute", "NixlConnector", marks=[NEEDS_NIXL, pytest.mark.long]),
    ],
)
def test_the_first_server_dies(policy: str, connector: str, model_folder: Path, tmp_path: Path) -> None:
    """The first server dies after one read."""
    with running_pair(model_folder, tmp_path, policy=policy, connector=connector) as pair:
        assert cached_tokens(pair.hand_over("/v1/completions", completion(9))) == 192
        body = completion(1)
        expected = post(pair.second, "/v1/completions", body)["choices"][0]["text"]
        httpx.post(pair.second.url + "/reset_prefix_cache", timeout=60).raise_for_status()
        params = pair.prefill("/v1/completions", body)
        os.kill(pair.first.core_pid(), signal.SIGKILL)
        pair.first.process.kill()
        asked = {**body, "kv_transfer_params": params}
        answer = httpx.post(pair.second.url + "/v1/completions", json=asked, timeout=60)
        if policy == "recompute":
            assert answer.json()["choices"][0]["text"] == expected
        else:
            assert answer.status_code == 500
            assert "kv_load_failure_policy" in answer.json()["error"]["message"]
        assert post(pair.second, "/v1/completions", completion(2))["choices"][0]["text"]


@pytest.mark.slow
def test_other_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    """Different weights are logged by name, and the prompt is recomputed."""
    other = make_model_folder(tmp_path / "other", seed=5)
    ports = free_ports(2)
    first = (*FLAGS, "--kv-transfer-config", config("kv_both", ports[0]))
    second = (*FLAGS, "--kv-transfer-config", config("kv_both", ports[1]))
    with (
        running_server(other, *first) as one,
        running_server(model_folder, *second, log=tmp_path / "log") as two,
    ):
        pair = Pair(one, two, tmp_path)
        body = completion(1)
        answer = pair.hand_over("/v1/completions", body)
        assert cached_tokens(answer) == 0
        assert answer["choices"][0]["text"] == post(two, "/v1/completions", body)["choices"][0]["text"]
        assert "are incompatible" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag", [pytest.param("--tensor-parallel-size", marks=pytest.mark.long), "--data-parallel-size"]
)
def test_ranks_and_cores_have_ports_of_their_own(flag: str, model_folder: Path, tmp_path: Path) -> None:
    """Each rank fetches its part from the same rank of the other server; each core says where its KV is."""
    flags = (*FLAGS, flag, "2", "--kv-transfer-config", config("kv_producer", two_free_ports()))
    other = (*FLAGS, *(flags[6:8] if "tensor" in flag else ()), "--kv-transfer-config")
    with (
        running_server(model_folder, *flags) as one,
        running_server(model_folder, *other, config("kv_consumer", free_ports(1)[0])) as two,
    ):
        pair = Pair(one, two, tmp_path)
        for seed in range(4):
            body = completion(seed)
            answer = pair.hand_over("/v1/completions", body)
            assert cached_tokens(answer) == 192
            assert answer["choices"][0]["text"] == post(one, "/v1/completions", body)["choices"][0]["text"]
        wait_until(lambda: pair.num_leases() == 0)


@pytest.mark.slow
def test_owners_stay_apart(model_folder: Path, tmp_path: Path) -> None:
    """With another owner's params no KV is found."""
    with running_pair(model_folder, tmp_path, "--api-key", "alice:A", "--api-key", "bob:B") as pair:
        body = completion(1)
        found = []
        for key in ("B", "A"):
            order = {**body, "max_tokens": 1, "kv_transfer_params": ORDER}
            params = post(pair.first, "/v1/completions", order, Authorization="Bearer A")[
                "kv_transfer_params"
            ]
            asked = {**body, "kv_transfer_params": params}
            found.append(post(pair.second, "/v1/completions", asked, Authorization=f"Bearer {key}"))
        assert [cached_tokens(answer) for answer in found] == [0, 192]
