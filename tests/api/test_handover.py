"""Jobs whose server ends while their tools run: the next server finds their KV, and knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, is_alive, running_server
from tests.api.test_jobs_endpoints import Body, ask, call, job, receipt
from tests.api.test_service import eventually

BLOCK = 16
WORDS = "a job of many words " * 12


def next_turn(http: httpx.Client, messages: list[Body], **name: str) -> Body:
    return ask(http, messages, temperature=0, **name)


@contextmanager
def server_at(model: Path, shared: Path, *flags: str) -> Iterator[tuple[Server, httpx.Client]]:
    more = ("--num-gpu-blocks-override", "400", "--kv-handover-path", str(shared), *flags)
    with (
        running_server(model, *more) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield server, http


def ended_by_sigterm(server: Server) -> None:
    server.process.terminate()
    assert server.wait(60) == 0


def ended_by_the_death_of_its_front(server: Server) -> None:
    """The process for HTTP is killed, and the core notices."""
    core = server.core_pid()
    server.process.kill()
    assert eventually(lambda: not is_alive(core), 30)


@pytest.mark.slow
@pytest.mark.parametrize("end", [ended_by_sigterm, ended_by_the_death_of_its_front])
def test_the_next_server_goes_on(model: Path, tmp_path: Path, end: Callable[[Server], None]) -> None:
    """A named job and one that is recognized by its prompt: nothing is computed again but the block that was
    not full, the receipt counts on, and the answer is that of a server that was not disturbed. The trace
    replays."""
    names: tuple[dict[str, str], ...] = ({"job_id": "named"}, {})
    with server_at(model, tmp_path / "undisturbed") as (_, http):
        undisturbed = [
            next_turn(http, call(http, f"{number} {WORDS}", **name)[0], **name)
            for number, name in enumerate(names)
        ]
    with server_at(model, tmp_path / "kv") as (server, http):
        paused = [call(http, f"{number} {WORDS}", **name) for number, name in enumerate(names)]
        end(server)
    trace = tmp_path / "trace.jsonl"
    with server_at(model, tmp_path / "kv", "--trace", str(trace)) as (server, http):
        for (messages, before), name, expected in zip(paused, names, undisturbed, strict=True):
            answer = next_turn(http, messages, **name)
            told = receipt(answer)
            assert answer["choices"] == expected["choices"]
            assert told["turn"] == 2
            assert told["cached_tokens"] == receipt(before)["pinned_tokens"] > 0
            assert told["recomputed_tokens"] == 0
            assert told["previous_pin"] == "handed_over"
            assert told["gap_s"] > 0
            assert told["job_id"] == receipt(before)["job_id"]
        assert job(http, "named")["turns"] == 2
        assert http.get("/v1/jobs").json()["data"][0]["turns"] == 2
        assert server.interrupt() == 0
    assert main(["trace", "replay", str(trace)]) == 0


@pytest.mark.slow
def test_others_with_the_same_prompt_are_other_jobs(model: Path, tmp_path: Path) -> None:
    """They load the KV, and are not taken for the job: a prompt sent again, and a turn under another id."""
    with server_at(model, tmp_path) as (server, http):
        messages, before = call(http, WORDS)
        named, _ = call(http, f"named {WORDS}", job_id="main")
        ended_by_sigterm(server)
    with server_at(model, tmp_path) as (_, http):
        again = receipt(ask(http, messages[:1]))
        assert again["turn"] == 1
        assert again["job_id"] != receipt(before)["job_id"]
        assert again["cached_tokens"] > 0
        other = receipt(ask(http, named, job_id="other"))
        assert (other["turn"], other["job_id"]) == (1, "other")
        assert other["cached_tokens"] > 0
        known = {job["id"]: job["turns"] for job in http.get("/v1/jobs").json()["data"]}
        assert known == {again["job_id"]: 1, "other": 1}
        back = receipt(ask(http, messages))
        assert (back["turn"], back["job_id"]) == (2, receipt(before)["job_id"])


@pytest.mark.slow
def test_owners_find_only_their_own(model: Path, tmp_path: Path) -> None:
    """A job of the same name and prompt under another key is another job, and finds nothing."""
    keys = ("--api-key", "alice:key-of-alice", "--api-key", "bob:key-of-bob")
    with server_at(model, tmp_path, *keys) as (server, http):
        http.headers["authorization"] = "Bearer key-of-alice"
        messages, before = call(http, WORDS, job_id="main")
        ended_by_sigterm(server)
    with server_at(model, tmp_path, *keys) as (_, http):
        for owner, expected in (("bob", (1, 0)), ("alice", (2, receipt(before)["pinned_tokens"]))):
            http.headers["authorization"] = f"Bearer key-of-{owner}"
            told = receipt(ask(http, messages, job_id="main"))
            assert (told["turn"], told["cached_tokens"]) == expected


@pytest.mark.slow
def test_what_is_damaged_or_of_another_model_is_computed(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A record whose blocks are gone, one that is not ours, and other weights: the turn runs all the same."""
    other = make_model_folder(tmp_path_factory.mktemp("other"), "llama", max_position_embeddings=1024)
    with server_at(model, tmp_path) as (server, http):
        messages, before = call(http, WORDS, job_id="main")
        ended_by_sigterm(server)
    blocks = [path for path in tmp_path.glob("*/rank*/*/*") if path.is_file()]
    with server_at(other, tmp_path) as (_, http):
        assert receipt(ask(http, messages, job_id="main"))["cached_tokens"] == 0
    assert len(blocks) * BLOCK >= receipt(before)["pinned_tokens"]
    blocks[0].unlink()
    with server_at(model, tmp_path) as (server, http):
        told = receipt(ask(http, messages, job_id="main"))
        ended_by_sigterm(server)
        assert told["cached_tokens"] == 0
        assert told["recomputed_tokens"] == receipt(before)["pinned_tokens"]
    for record in tmp_path.glob("*/paused/*"):
        record.write_bytes(b"\x00 not a record")
    with server_at(model, tmp_path) as (_, http):
        assert receipt(ask(http, messages, job_id="main"))["turn"] == 1


def test_a_folder_beside_another_connector_is_refused(model: Path, tmp_path: Path) -> None:
    command = ["serve", str(model), "--kv-handover-path", str(tmp_path)]
    assert main([*command, "--kv-transfer-config", '{"kv_connector": "TCPConnector"}']) == 2
