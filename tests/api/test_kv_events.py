"""KV events of a real server and of an LLM, read by a subscriber that shares no code with us."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from engine.errors import ConfigError, ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.api.server import running_server
from tests.api.test_chat import TOOL
from tests.api.test_jobs_endpoints import call, signal
from tests.processes.event_subscriber import Subscriber, free_ports, subscriber

BLOCK = 16
SMALL = ("--num-gpu-blocks-override", "40", "--max-model-len", "480")
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports on which a server publishes, and the config that sets them."""

    events: int
    replay: int
    pins: int

    @property
    def config(self) -> dict[str, Any]:
        names = {"endpoint": self.events, "replay_endpoint": self.replay, "pins_endpoint": self.pins}
        addresses = {name: f"tcp://*:{port}" for name, port in names.items()}
        return {"enable_kv_cache_events": True, "publisher": "zmq", **addresses}

    @contextmanager
    def reader(self) -> Iterator[Subscriber]:
        replay = f"tcp://127.0.0.1:{self.replay}"
        with subscriber(f"tcp://127.0.0.1:{self.events}", replay=replay) as reads:
            yield reads


@pytest.fixture
def ports() -> Ports:
    return Ports(*free_ports(3))


def cached(events: list[Event], medium: str = "GPU") -> set[int]:
    """The sequences cached on a medium after these events."""
    found: set[int] = set()
    for event in events:
        if event["type"] == "AllBlocksCleared":
            found.clear()
        elif event["medium"] == medium:
            hashes = set(event["block_hashes"])
            found = found | hashes if event["type"] == "BlockStored" else found - hashes
    return found


def sequence_to(block_hash: int, events: list[Event]) -> list[int]:
    """The tokens up to and including this block, found by following parents."""
    parents: dict[int, tuple[int | None, list[int]]] = {}
    for event in events:
        if event["type"] == "BlockStored":
            parent, tokens = event["parent_block_hash"], event["token_ids"]
            for i, each in enumerate(event["block_hashes"]):
                parents[each] = parent, tokens[i * BLOCK : (i + 1) * BLOCK]
                parent = each
    sequence: list[int] = []
    following: int | None = block_hash
    while following is not None:
        following, tokens = parents[following]
        sequence = tokens + sequence
    return sequence


def complete(http: httpx.Client, prompt: str, **fields: object) -> list[int]:
    """Runs a completion to its full length; returns the tokens of its prompt."""
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
    assert http.post("/v1/completions", json=body).status_code == 200
    [rendered] = http.post("/v1/completions/render", json=body).json()
    tokens: list[int] = rendered["token_ids"]
    return tokens


@pytest.mark.slow
def test_a_server_tells_what_it_caches(model: Path, ports: Ports) -> None:
    """Events report the blocks of every turn with their tokens, evictions, and the reset. A late subscriber
    that requests a replay has the same state."""
    flags = (*SMALL, "--kv-events-config", json.dumps(ports.config))
    with (
        ports.reader() as reads,
        running_server(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        tokens = complete(http, "count with me, one two three. " * 8, job_id="counts")
        num_blocks = len(tokens) // BLOCK
        events = reads.read_until(lambda events: len(cached(events)) >= num_blocks)
        first = events[0]
        assert (first["type"], first["parent_block_hash"]) == ("BlockStored", None)
        assert (first["block_size"], first["medium"], first["group_idx"]) == (BLOCK, "GPU", 0)
        assert (first["lora_id"], first["lora_name"], first["session_id"]) == (None, None, "counts")
        assert sequence_to(first["block_hashes"][-1], events) == tokens[: num_blocks * BLOCK]
        batch = reads.batches[0]
        assert abs(batch[0] - time.time()) < 600
        assert batch[2] == 0
        http.post("/v1/jobs/counts/finish").raise_for_status()  # else its pin keeps the blocks
        for i in range(8):
            complete(http, f"{i} " * 150)
        before = set(first["block_hashes"])
        events = reads.read_until(lambda events: not before & cached(events))
        with ports.reader() as late:
            assert late.read_until(lambda late: len(late) >= len(events))[: len(events)] == events
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        events = reads.read_until(lambda events: events[-1] == {"type": "AllBlocksCleared"})
        assert not cached(events)
        assert sorted(reads.batches) == list(range(len(reads.batches)))
        assert "continuum:kv_events_dropped_total{" in http.get("/metrics").text
        assert server.interrupt() == 0


@pytest.mark.slow
def test_a_server_tells_what_becomes_of_pins(model: Path, ports: Ports) -> None:
    """Events of pins use a separate socket, invisible to readers of V1's events: created with a deadline,
    handed over to the job's next turn, and released when the job is finished."""
    flags = ("--num-gpu-blocks-override", "400", "--kv-events-config", json.dumps(ports.config))
    with (
        ports.reader() as reads,
        subscriber(f"tcp://127.0.0.1:{ports.pins}", "pins") as pins,
        running_server(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        while not pins.has_news:  # Until the subscription works.
            call(http, "a job that nobody asks about " * 4, job_id="early")
        began = time.time()
        messages, _ = call(http, "a job of many words " * 20, job_id="one")
        (placed,) = of_job_one(pins.read_until(lambda events: len(of_job_one(events)) == 1))
        assert placed["type"] == "PinPlaced"
        assert placed["num_tokens"] == placed["num_blocks"] * BLOCK > 100
        assert began < placed["held_until"]
        events = reads.read_until(lambda events: placed["block_hash"] in cached(events))
        assert len(sequence_to(placed["block_hash"], events)) == placed["num_tokens"]
        signal(http, "one", state="progress", remaining_s=9.0)
        _, moved = of_job_one(pins.read_until(lambda events: len(of_job_one(events)) == 2))
        assert moved["type"] == "PinChanged"
        assert moved["held_until"] != placed["held_until"]
        assert (moved["block_hash"], "reason" in moved) == (placed["block_hash"], False)
        again = {"messages": messages, "max_tokens": 4, "job_id": "one", "tools": [TOOL]}
        http.post("/v1/chat/completions", json=again).raise_for_status()
        http.post("/v1/jobs/one/finish").raise_for_status()
        events = of_job_one(pins.read_until(lambda events: "released" in reasons(events)))
        assert reasons(events) == ["handed_over", "released"]
        assert next(each for each in events if "reason" in each)["pin_id"] == placed["pin_id"]
        assert pins.topics == {b"pins"}


def of_job_one(events: list[Event]) -> list[Event]:
    return [event for event in events if event["job_id"] == "one"]


def reasons(events: list[Event]) -> list[str]:
    """The causes for which pins of the job ended or were cut."""
    return [event["reason"] for event in of_job_one(events) if "reason" in event]


def test_an_llm_tells_what_host_memory_has(model: Path, ports: Ports) -> None:
    """Copies in host memory are events of another medium with the same hashes; device evictions leave
    them."""
    greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"num_gpu_blocks_override": 20, "num_host_blocks_override": 100}
    config = {**ports.config, "topic": "kv"}
    with (
        ports.reader() as reads,
        LLM(model, multiprocess=False, max_model_len=300, kv_events_config=config, **options) as llm,
    ):
        prompts = [list(range(i, i + 200)) for i in range(3)]
        for prompt in prompts:
            llm.generate([prompt], greedy, use_tqdm=False)
        wanted = 3 * (200 // BLOCK)
        events = reads.read_until(lambda events: len(cached(events, "CPU")) >= wanted)
        assert len(cached(events, "GPU")) < 20
        assert cached(events, "GPU") <= cached(events, "CPU")
        copies = [event for event in events if event.get("medium") == "CPU"]
        assert sequence_to(copies[0]["block_hashes"][-1], copies) == prompts[0][:192]
        assert llm.reset_prefix_cache()
        reads.read_until(lambda events: events[-1] == {"type": "AllBlocksCleared"})


def test_off_nothing_is_recorded(model: Path) -> None:
    """Nothing is recorded by default, nor with V1's null publisher, whatever else is configured."""
    for config in (None, {"enable_kv_cache_events": True, "publisher": "null", "endpoint": "tcp://*:1"}):
        with LLM(model, multiprocess=False, num_gpu_blocks_override=80, kv_events_config=config) as llm:
            llm.generate([[1] * 40], SamplingParams(max_tokens=2), use_tqdm=False)


def test_events_need_prefix_caching(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_events_config needs prefix caching"):
        LLM(model, enable_prefix_caching=False, kv_events_config={"enable_kv_cache_events": True})


def test_a_field_that_there_is_not_stops_the_start(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown field is refused in one sentence before anything is loaded."""
    assert main(["serve", str(model), "--kv-events-config", '{"endpoints": "tcp://*:1"}']) == 2
    assert "unknown field 'endpoints'; choose from buffer_steps, enable" in capsys.readouterr().err


@pytest.mark.slow
def test_an_address_in_use_stops_the_start(model: Path, ports: Ports) -> None:
    taken = subscriber(f"tcp://127.0.0.1:{ports.pins}", binds=True)
    with taken, pytest.raises(ConfigError, match="Address already in use"):
        LLM(model, num_gpu_blocks_override=80, kv_events_config=ports.config)


def test_what_does_not_come_to_be_leaves_its_addresses(model: Path, ports: Ports) -> None:
    """If the model does not fit into the pool, a second try in the same process can use the same ports."""
    with pytest.raises(ModelLoadError, match="max_model_len"):
        LLM(model, multiprocess=False, num_gpu_blocks_override=20, kv_events_config=ports.config)
    with LLM(model, multiprocess=False, num_gpu_blocks_override=80, kv_events_config=ports.config):
        pass


@pytest.mark.slow
def test_each_of_several_cores_publishes_at_its_own_port(model: Path) -> None:
    """Each core publishes on its own port, one higher per core as in V1, with its rank in each batch;
    together they report all prompts."""
    first = two_ports_in_a_row()
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{first}"}
    flags = (*SMALL, "--data-parallel-size", "2", "--kv-events-config", json.dumps(config))
    with (
        running_server(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        subscriber(f"tcp://127.0.0.1:{first}") as one,
        subscriber(f"tcp://127.0.0.1:{first + 1}") as two,
    ):
        deadline, number = time.monotonic() + 60, 0
        while not (one.batches and two.batches):
            assert time.monotonic() < deadline, "a core has published nothing"
            prompt = [1 + (number * 7 + i) % 400 for i in range(3 * BLOCK)]
            assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).is_success
            number += 1
            for reads in (one, two):
                reads.take()
        for rank, reads in enumerate((one, two)):
            assert {batch[2] for batch in reads.batches.values()} == {rank}


def two_ports_in_a_row() -> int:
    """The first of two consecutive free ports."""
    for _ in range(100):
        (first,) = free_ports(1)
        with suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first
    raise AssertionError("there are no two free ports in a row")
