"""Promises of a server's trace: who may switch it over HTTP while it serves, and to which files; kills."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.clock import MonotonicClock
from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, TraceConfig
from engine.core.policy import fcfs
from engine.core_process.engine_core import EngineCore
from engine.core_process.trace_control import TraceControl
from engine.errors import ConfigError
from engine.frontend.stats import IterationStats
from engine.metrics.metrics import Metrics
from engine.metrics.page import Page
from engine.records.messages import EngineCoreRequest
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory
from tests.api.server import Server, running_server
from tests.api.test_service import eventually
from tracing.events import StepDecision, StepSnapshot, TraceEnd, TraceEvent, TraceHeader
from tracing.parts import find_parts
from tracing.reader import TraceReport, read_trace
from tracing.tracer import Tracer

KEY = "sk-operator"
BLOCKS = ("--num-gpu-blocks-override", "1000")
ANSWER = {"prompt": "One two three", "max_tokens": 60, "ignore_eos": True}
PART_BYTES = 30_000
SERVED_S, LAST_MOMENTS_S = 0.8, 0.4
"""How long an answer is read before its server is killed; how much of its end the trace may lack."""
HEADER = TraceHeader(wall_time_s=0.0, monotonic_s=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operator") / "traces"


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    """Two API servers with a key and a folder for traces; there is no trace at the start."""
    flags = ("--trace-dir", str(folder), "--trace-max-bytes", str(PART_BYTES), "--api-server-count", "2")
    with running_server(model, *BLOCKS, *flags, "--api-key", KEY) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client
        assert switch(client, False)["state"] == "off"


def switch(http: httpx.Client, enabled: bool, name: str | None = None) -> dict[str, Any]:
    answer = http.post("/trace", json={"enabled": enabled} | ({} if name is None else {"name": name}))
    assert answer.status_code == 200, answer.text
    state: dict[str, Any] = answer.json()
    return state


def refusal(http: httpx.Client, body: dict[str, Any]) -> str:
    answer = http.post("/trace", json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def serve_on(http: httpx.Client, until: threading.Event) -> int:
    """Sends requests until the event; asserts that each answer is complete, and returns their number."""
    count = 0
    while not until.is_set():
        answer = http.post("/v1/completions", json=ANSWER)
        assert answer.json()["usage"]["completion_tokens"] == ANSWER["max_tokens"], answer.text
        count += 1
    return count


def steps_of(events: list[TraceEvent]) -> list[int]:
    """Numbers of the steps; asserts that each was decided, except the last of a cut trace."""
    snapshots = [event.step for event in events if isinstance(event, StepSnapshot)]
    decided = [event.step for event in events if isinstance(event, StepDecision)]
    assert decided in (snapshots, snapshots[:-1])
    assert snapshots == list(range(snapshots[0], snapshots[0] + len(snapshots)))
    return snapshots


@pytest.mark.slow
def test_switched_on_and_off_while_it_serves(http: httpx.Client, folder: Path) -> None:
    """No answer suffers; all steps in between are in the trace, which has several parts."""
    assert http.get("/trace").json()["state"] == "off"
    stop = threading.Event()
    with ThreadPoolExecutor(3) as clients:
        served = [clients.submit(serve_on, http, stop) for _ in range(3)]
        try:
            state = switch(http, True, "run.jsonl")
            assert (state["state"], state["name"], state["from_start"]) == ("on", "run.jsonl", False)
            assert switch(http, True, "run.jsonl")["state"] == "on"
            assert eventually(lambda: http.get("/trace").json()["part"] > 3, 60)
            state = switch(http, False)
        finally:
            stop.set()
        assert all(answers.result() > 0 for answers in served)
    assert (state["state"], state["error"], state["dropped"]) == ("off", None, 0)
    report = TraceReport()
    events = list(read_trace(folder / "run.jsonl", report))
    header, *_, end = events
    assert isinstance(header, TraceHeader)
    assert not header.from_start
    assert header.policy
    assert end == report.end == TraceEnd(written=state["written"], dropped=0)
    assert report.num_parts == state["part"] == len(find_parts(folder / "run.jsonl"))
    assert len(steps_of(events)) > 50


def test_every_front_end_says_the_same(server: Server, http: httpx.Client, folder: Path) -> None:
    """There is one trace for all API servers; without a given name it gets one, compressed."""
    switch(http, True)
    pids, names = set(), set()

    def both_asked() -> bool:
        with httpx.Client(base_url=server.url, headers=http.headers) as client:  # a new connection
            pids.add(client.get("/load").json()["process_id"])
            state = client.get("/trace").json()
            assert state["state"] == "on"
            names.add(state["name"])
        return len(pids) == 2

    assert eventually(both_asked, 30)
    (name,) = names
    assert name.startswith("trace-")
    assert name.endswith(".jsonl.zst")
    http.post("/v1/completions", json=ANSWER)
    switch(http, False)
    assert isinstance(list(read_trace(folder / name))[-1], TraceEnd)


def test_a_client_may_not_write_where_it_likes(http: httpx.Client, folder: Path) -> None:
    """Only new files in the operator's folder, named like traces, are allowed; no file is replaced."""
    for name in ("../up.jsonl", "/tmp/up.jsonl", "a/b.jsonl", ".hidden.jsonl", "x.txt", "", "x.jsonl\n"):
        assert "name must be" in refusal(http, {"enabled": True, "name": name})
    assert "name must be" in refusal(http, {"enabled": True, "name": "x.part0002.jsonl"})
    assert "name must be" in refusal(http, {"enabled": True, "name": "x" * 100 + ".jsonl"})
    (folder / "mine.jsonl").write_text("precious")
    (folder / "link.jsonl").symlink_to(folder / "elsewhere")
    (folder / "old.part0002.jsonl").write_text("a part of another")
    for name in ("mine.jsonl", "link.jsonl", "old.jsonl"):
        assert "File exists" in refusal(http, {"enabled": True, "name": name})
    assert (folder / "mine.jsonl").read_text() == "precious"
    assert not (folder / "elsewhere").exists()
    assert http.get("/trace").json()["state"] == "off"
    switch(http, True, "first.jsonl")
    assert "to first.jsonl is already active" in refusal(http, {"enabled": True, "name": "second.jsonl"})


def test_the_key_guards_it(server: Server) -> None:
    """Without the key the trace can be neither seen nor switched."""
    assert httpx.get(f"{server.url}/trace").status_code == 401
    assert httpx.post(f"{server.url}/trace", json={"enabled": True}).status_code == 401


@pytest.mark.slow
def test_killed_in_the_middle(model: Path, tmp_path: Path) -> None:
    """After kill -9 the trace is readable up to the last moments. No trace is ever replaced, neither when it
    is switched on again nor by a restart, and each is private to its owner."""
    path = tmp_path / "trace.jsonl.zst"
    with (
        running_server(model, *BLOCKS, "--trace", str(path)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        state = http.get("/trace").json()
        assert (state["state"], state["name"], state["from_start"]) == ("on", "trace.jsonl.zst", True)
        http.post("/v1/completions", json=ANSWER)
        assert switch(http, False)["state"] == "off"
        assert "started with --trace-dir" in refusal(http, {"enabled": True, "name": "b.jsonl"})
        first = list(read_trace(path))
        assert isinstance(first[-1], TraceEnd)
        assert switch(http, True)["name"] == "trace-2.jsonl.zst"
        body = ANSWER | {"max_tokens": 3000, "stream": True}
        seen_s: list[float] = []
        with http.stream("POST", "/v1/completions", json=body) as response:
            for _ in filter(None, response.iter_lines()):
                seen_s.append(time.monotonic())
                if seen_s[-1] - seen_s[0] > SERVED_S:
                    os.kill(server.core_pid(), signal.SIGKILL)
                    break
    assert list(read_trace(path)) == first
    crashed = (tmp_path / "trace-2.jsonl.zst").read_bytes()
    with (
        running_server(model, *BLOCKS, "--trace", str(path), log=tmp_path / "log") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.get("/trace").json()["name"] == "trace-3.jsonl.zst"
    assert f"Trace file {path} exists and is kept: writing to" in (tmp_path / "log").read_text()
    assert (tmp_path / "trace-2.jsonl.zst").read_bytes() == crashed
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob("trace*")} == {0o600}
    report = TraceReport()
    events = list(read_trace(tmp_path / "trace-2.jsonl.zst", report))
    assert report.end is None
    # All that the client has seen, except the last moments.
    assert len(steps_of(events)) >= sum(at < seen_s[-1] - LAST_MOMENTS_S for at in seen_s) > 0


@pytest.mark.slow
def test_a_stuck_disk_blocks_no_step(tmp_path: Path) -> None:
    """A FIFO that no process reads takes a little and then nothing: the engine goes on, lost events are
    counted in /metrics, and switching off does not wait."""
    fifo = tmp_path / "trace.jsonl"
    os.mkfifo(fifo)
    read_end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    config = EngineConfig(
        model=ModelConfig(model="fake"),
        cache=CacheConfig(num_gpu_blocks_override=400),
        trace=TraceConfig(trace_path=str(fifo)),
    )
    core = EngineCore(config, FakeExecutorFactory(), fcfs, MonotonicClock())
    page = Page()
    metrics = Metrics(page, "fake", 4096)
    num_dropped = num_tokens = 0
    for number in range(10):
        params = SamplingParams(max_tokens=3000, ignore_eos=True)
        core.add_request(EngineCoreRequest(f"r{number}", [1] * 8, params, 0.0))
        while core.scheduler.has_unfinished_requests():
            outputs = core.step()
            assert outputs is not None
            assert outputs.scheduler_stats is not None
            num_tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
            num_dropped += outputs.scheduler_stats.trace_dropped
            metrics.record(outputs.scheduler_stats, IterationStats(0.0))
    assert num_tokens == 30_000
    state = core.call_utility("trace_state", [])
    assert (state.state, state.dropped) == ("on", num_dropped)
    assert num_dropped > 0
    assert (
        f'trace_events_dropped_total{{engine="0",model_name="fake"}} {num_dropped}.0'
        in page.exposition().decode()
    )
    assert core.call_utility("switch_trace", [False]).state == "closing"
    assert "still being written" in core.call_utility("switch_trace", [True])
    os.close(read_end)  # a broken pipe ends the thread that writes
    assert eventually(lambda: core.call_utility("trace_state", []).state == "off")
    core.close()


def test_an_engine_that_is_ready_has_its_header_in_the_file(tmp_path: Path) -> None:
    """The header is on disk although another thread writes it: ``continuum profile`` reads it at once."""
    for number in range(20):
        path = tmp_path / f"{number}.jsonl"
        config = TraceConfig(trace_path=str(path))
        control = TraceControl(config, Tracer(), threading.RLock(), lambda from_start: HEADER)
        control.start()
        assert next(iter(read_trace(path))) == HEADER
        control.persist(0.0)


def test_where_no_trace_may_be_written() -> None:
    """A server without file and folder for traces says which flags it needs."""
    control = TraceControl(TraceConfig(), Tracer(), threading.RLock(), lambda from_start: HEADER)
    assert "--trace-dir FOLDER or --trace PATH" in str(control.switch(True))
    assert control.switch(False) == control.state()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"trace_max_files": 3}, "trace_max_files needs trace_max_bytes"),
        ({"trace_path": "t.jsonl.gz"}, "compressed with zstd only; use a name that ends in .jsonl.zst"),
        ({"trace_max_bytes": 1 << 20}, "trace_max_bytes needs trace_path or trace_dir"),
        ({"trace_max_bytes": 10, "trace_path": "t"}, "trace_max_bytes must be at least 1024"),
        ({"trace_max_bytes": 1 << 20, "trace_max_files": 1, "trace_path": "t"}, "trace_max_files must be at"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], fault: str) -> None:
    """An option that would be ignored, or keep nothing, is refused."""
    with pytest.raises(ConfigError, match=fault):
        TraceConfig(**options)
