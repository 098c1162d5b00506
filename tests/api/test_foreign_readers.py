"""Dynamo's own indexer, which shares no code with us, reads our KV events and finds what is cached."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.api.test_kv_events import BLOCK, Event, Ports, cached, sequence_to
from tests.processes.event_subscriber import free_ports

TIMEOUT_S = 30.0
A_MOMENT_S = 0.5
MOST_TRIES = 40
PYTHON_VARIABLE = "DYNAMO_PYTHON"
"""An interpreter with the wheels of ``ai-dynamo``, if this one lacks them."""
SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def python_with_dynamo() -> str:
    """Skips the test if no interpreter has the wheels."""
    python = os.environ.get(PYTHON_VARIABLE, sys.executable)
    found = subprocess.run([python, "-c", "import dynamo.indexer.main"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"Dynamo's indexer is not here: pip install ai-dynamo, and name it by {PYTHON_VARIABLE}.")
    return python


@pytest.fixture
def ports() -> Ports:
    return Ports(*free_ports(3))


class Indexer:
    """A running ``python -m dynamo.indexer`` that subscribes to one engine."""

    def __init__(self, url: str, ports: Ports) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._addresses = {
            "endpoint": f"tcp://127.0.0.1:{ports.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports.replay}",
        }

    def close(self) -> None:
        self._http.close()

    def await_start(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._http.get("/workers").raise_for_status()
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the indexer did not start"

    def register(self) -> None:
        names = {"instance_id": 1, "model_name": "m", "block_size": BLOCK, "dp_rank": 0}
        self._http.post("/register", json={**names, **self._addresses}).raise_for_status()

    def await_listening(self, llm: LLM) -> None:
        """Runs requests until the indexer reports one: it misses events sent before its subscription, and
        requests a replay with the next."""
        for number in range(MOST_TRIES):
            prompt = [number] * (BLOCK + 4)
            llm.generate([prompt], SHORT, use_tqdm=False)
            deadline = time.monotonic() + A_MOMENT_S
            while time.monotonic() < deadline:
                if self.query(prompt):
                    return
        raise AssertionError("the indexer hears nothing")

    def query(self, tokens: list[int]) -> dict[str, int]:
        """The number of these tokens found on each tier; empty for none."""
        answer = self._http.post("/query", json={"token_ids": tokens, "model_name": "m"})
        answer.raise_for_status()
        found: dict[str, int] = answer.json()["instances"].get("1", {})
        return found

    def await_found(self, tokens: list[int], done: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Polls until ``done`` accepts the result, since the indexer reads events asynchronously."""
        deadline = time.monotonic() + TIMEOUT_S
        while not done(found := self.query(tokens)):
            assert time.monotonic() < deadline, f"it finds {found} of {len(tokens)} tokens"
        return found


@contextmanager
def running_indexer(ports: Ports, log: Path) -> Iterator[Indexer]:
    python, port = python_with_dynamo(), free_ports(1)[0]
    with log.open("wb") as said:
        command = [python, "-m", "dynamo.indexer", "--port", str(port)]
        process = subprocess.Popen(command, stdout=said, stderr=said)
        indexer = Indexer(f"http://127.0.0.1:{port}", ports)
        try:
            indexer.await_start()
            yield indexer
        finally:
            indexer.close()
            process.kill()
            process.wait()


def random_prompts() -> list[list[int]]:
    """A dozen prompts that share prefixes. The last block of each has space for the output, so that no event
    follows the one that stores its blocks."""
    random = Random(1)
    shared = [random.randrange(400) for _ in range(6 * BLOCK)]
    return [
        shared[: random.randrange(7) * BLOCK] + [random.randrange(400) for _ in range(8 * BLOCK + 4)]
        for _ in range(12)
    ]


def cached_of(prompt: list[int], sequences: set[tuple[int, ...]]) -> int:
    """The number of leading tokens of the prompt that are cached."""
    count = 0
    while count < whole(prompt) and tuple(prompt[: count + BLOCK]) in sequences:
        count += BLOCK
    return count


@pytest.mark.slow
def test_dynamo_finds_what_is_cached_and_nothing_else(model: Path, ports: Ports, tmp_path: Path) -> None:
    """The indexer finds all tokens of fully cached prompts, as many as a hit has for others, and none after a
    reset, although it subscribes late and replays the past."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_model_len": 480}
    with (
        running_indexer(ports, tmp_path / "log") as indexer,
        ports.reader() as reads,
        LLM(model, kv_events_config=ports.config, **options) as llm,
    ):
        prompts = random_prompts()
        llm.generate(prompts[:-1], SHORT, use_tqdm=False)
        indexer.register()
        indexer.await_listening(llm)
        last = prompts[-1]
        llm.generate([last], SHORT, use_tqdm=False)
        indexer.await_found(last, lambda found: longest(found) == whole(last))
        events = reads.read_until(lambda events: sequence_in(last, events))
        sequences = {tuple(sequence_to(each, events)) for each in cached(events)}
        expected = [cached_of(prompt, sequences) for prompt in prompts]
        assert [longest(indexer.query(prompt)) for prompt in prompts] == expected
        cut = next(i for i, num in enumerate(expected) if 0 < num < whole(prompts[i]))
        (output,) = llm.generate([prompts[cut]], SHORT, use_tqdm=False)
        assert output.num_cached_tokens == expected[cut]
        assert llm.reset_prefix_cache()
        indexer.await_found(prompts[cut], lambda found: not found)


@pytest.mark.slow
def test_dynamo_tells_host_memory_from_the_device(model: Path, ports: Ports, tmp_path: Path) -> None:
    """Blocks that the device has evicted are found on the host tier."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 31,
        "num_host_blocks_override": 100,
        "max_model_len": 480,
    }
    with (
        running_indexer(ports, tmp_path / "log") as indexer,
        LLM(model, kv_events_config=ports.config, **options) as llm,
    ):
        indexer.register()
        indexer.await_listening(llm)
        first, second = [[i] * (25 * BLOCK + 4) for i in (1, 2)]
        for prompt in (first, second):
            llm.generate([prompt], SHORT, use_tqdm=False)
        indexer.await_found(second, lambda found: found.get("gpu") == whole(second))
        found = indexer.query(first)
        assert found["gpu"] < found["cpu"] == found["longest_matched"] == whole(first)


def sequence_in(tokens: list[int], events: list[Event]) -> bool:
    """Whether these tokens are a cached sequence."""
    return any(sequence_to(each, events) == tokens[: whole(tokens)] for each in cached(events))


def whole(tokens: list[int]) -> int:
    """The number of tokens that fill whole blocks."""
    return len(tokens) // BLOCK * BLOCK


def longest(found: dict[str, int]) -> int:
    return found.get("longest_matched", 0)
