"""The core as a process: it starts or says why not, survives bad messages, and clients see its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.clock import MonotonicClock
from engine.core.policy import PolicyContext, SchedulingPolicy, fcfs
from engine.core_process.core_client import SyncMPClient
from engine.core_process.inproc_client import InprocClient
from engine.errors import ConfigError, EngineDeadError, EngineGenerateError, ModelLoadError
from engine.records.messages import ClientNotice, EngineCoreRequestType, FinishReason, JobRef, ToolGapStarted
from engine.testing import FakeExecutorFactory, fake_token
from tests.processes.support import (
    GONE_WITHIN_S,
    PinningPolicyFactory,
    SignalPolicyFactory,
    config,
    core_request,
    freeze,
    has_gone,
)

Start = Callable[..., SyncMPClient]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts cores, and stops them after the test."""
    clients: list[SyncMPClient] = []

    def start_one(**behaviour: object) -> SyncMPClient:
        factory = FakeExecutorFactory(**behaviour)  # type: ignore[arg-type]
        clients.append(SyncMPClient(config(), factory, SignalPolicyFactory()))
        clients[-1].await_ready()
        return clients[-1]

    yield start_one
    for client in clients:
        client.close()


def tokens_until_finished(client: SyncMPClient, request_id: str) -> tuple[list[int], FinishReason]:
    """The core's tokens for one request, and its finish reason."""
    tokens: list[int] = []
    while True:
        for output in client.get_output().outputs:
            if output.request_id == request_id:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens, output.finish_reason


def test_a_request_goes_through(start: Start) -> None:
    """Tokens arrive in order over the sockets, with one finish reason."""
    client = start()
    client.add_request(core_request("a-1", max_tokens=30))
    tokens, reason = tokens_until_finished(client, "a-1")
    assert tokens == [fake_token("a", position, 512) for position in range(30)]
    assert reason is FinishReason.LENGTH


def test_ready_describes_the_core(start: Start) -> None:
    """The handshake describes the core: blocks, block size, length, and whether it wants signals."""
    ready = start().ready
    assert (ready.num_gpu_blocks, ready.block_size, ready.max_model_len) == (64, 16, 4096)
    assert ready.wants_signals


def test_closing_leaves_nothing_behind(start: Start) -> None:
    """After close the process has exited by itself, and its sockets are gone."""
    client = start()
    client.close()
    assert has_gone(client.pid, 0)
    assert client.exit_code == 0
    assert not Path(client.folder).exists()
    client.close()


def failing_policy(context: PolicyContext) -> SchedulingPolicy:
    raise ConfigError("no such policy")


def test_a_core_that_cannot_start_says_why() -> None:
    """The client raises the core's error with the same sentence."""
    with pytest.raises(ModelLoadError, match=r"^No weights\.$"):
        SyncMPClient(config(), FakeExecutorFactory(fail_at_start="No weights."), fcfs).await_ready()
    with pytest.raises(ConfigError, match=r"^no such policy$"):
        SyncMPClient(config(), FakeExecutorFactory(), failing_policy).await_ready()


def test_a_factory_that_cannot_be_sent_is_refused() -> None:
    """A local function cannot cross into another process: it is refused at once, in one sentence."""

    def local_policy(context: PolicyContext) -> SchedulingPolicy:
        return fcfs(context)

    with pytest.raises(ConfigError, match="factory cannot be sent"):
        SyncMPClient(config(), FakeExecutorFactory(), local_policy)


def test_an_unwritable_trace_is_refused(tmp_path: Path) -> None:
    """A trace path that cannot be opened is a config error that names the option."""
    traced = config(str(tmp_path / "none" / "trace.jsonl"))
    with pytest.raises(ConfigError, match="trace_path"):
        SyncMPClient(traced, FakeExecutorFactory(), fcfs).await_ready()


@pytest.mark.parametrize("death", ["kill_at_step", "raise_at_step"])
def test_a_core_that_dies_in_a_step_is_noticed(start: Start, death: str) -> None:
    """When the core is killed or fails, waiting and later calls raise EngineDeadError."""
    client = start(**{death: 3})
    client.add_request(core_request("a-1"))
    with pytest.raises(EngineDeadError):
        tokens_until_finished(client, "a-1")
    with pytest.raises(EngineDeadError):
        client.get_output()
    with pytest.raises(EngineDeadError):
        client.add_request(core_request("a-2"))
    with pytest.raises(EngineDeadError):
        client.call_utility("statistics")
    client.close()
    assert client.exit_code == (-signal.SIGKILL if death == "kill_at_step" else 1)


def test_a_call_in_flight_fails_when_the_core_dies(start: Start) -> None:
    """A call whose answer can never come raises."""
    client = start()
    freeze(client.pid)  # it will not answer
    future = client.send_utility("statistics")
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        future.result(timeout=GONE_WITHIN_S)


def test_signals_and_calls_do_not_wait_for_a_step(start: Start, tmp_path: Path) -> None:
    """While the model is stuck in a step the core still answers, takes requests and ends them."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    client = start(gate=gate)
    client.add_request(core_request("a-1", max_tokens=2))
    with gate.open("wb"):  # opening for writing blocks until a step reads
        client.add_request(core_request("b-1"))
        client.abort_requests(["b-1"])
        assert client.get_output().outputs[0].finish_reason is FinishReason.ABORT
        assert client.call_utility("statistics")["num_running"] == 1
        client.abort_requests(["a-1"], stopped=True)
        assert client.get_output().outputs[0].finish_reason is FinishReason.STOP
        statistics = client.call_utility("statistics")
    assert statistics["num_free_blocks"] == statistics["num_blocks"]
    client.call_utility("check_invariants")


@pytest.mark.parametrize(
    "payload",
    [b"\xc1", b"\x93\xa1x", b"\x92\xa7broken-\x01", b""],
    ids=["not-msgpack", "cut", "wrong-fields", "empty"],
)
def test_a_message_that_cannot_be_read_costs_nobody_else(start: Start, payload: bytes) -> None:
    """The core survives any bytes, and other requests do not notice."""
    client = start()
    client.add_request(core_request("a-1", max_tokens=200))
    for kind in EngineCoreRequestType:
        client.send_raw(kind.value, payload)
    client.send_raw(b"\x77", payload)
    tokens, reason = tokens_until_finished(client, "a-1")
    assert len(tokens) == 200
    assert reason is FinishReason.LENGTH


def test_a_request_that_cannot_be_read_gets_an_error(start: Start) -> None:
    """If its id can be read, an unreadable request ends with an error."""
    client = start()
    client.send_raw(EngineCoreRequestType.ADD.value, b"\x92\xa7broken-\x01")
    assert tokens_until_finished(client, "broken-") == ([], FinishReason.ERROR)


@pytest.mark.parametrize("length", [0, 4096, 100_000])
def test_a_wrong_prompt_is_that_requests_error(start: Start, length: int) -> None:
    """A prompt that the API server should have refused does not stop the core."""
    client = start()
    client.add_request(core_request("wrong-1", num_prompt_tokens=length))
    assert tokens_until_finished(client, "wrong-1") == ([], FinishReason.ERROR)
    client.add_request(core_request("right-1", max_tokens=1))
    assert len(tokens_until_finished(client, "right-1")[0]) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_token_ids": [512]},
        {"allowed_token_ids": [-1]},
        {"bad_words_token_ids": [[5, 512]]},
        {"logit_bias": {512: 1.0}},
        {"replay_token_ids": [2**40]},
        {"temperature": -1.0},
        {"prompt": [5, 512]},
    ],
)
def test_ids_beyond_the_vocabulary_are_that_requests_error(start: Start, wrong: dict[str, Any]) -> None:
    """The core refuses ids with which the model would access memory out of bounds."""
    client = start()
    request = core_request("wrong-1")
    if "prompt" in wrong:
        changes = {"prompt_token_ids": wrong["prompt"]}
    else:
        changes = {"sampling_params": msgspec.structs.replace(request.sampling_params, **wrong)}
    request = msgspec.structs.replace(request, **changes)
    client.add_request(request)
    assert tokens_until_finished(client, "wrong-1") == ([], FinishReason.ERROR)
    client.add_request(core_request("right-1", max_tokens=1))
    assert len(tokens_until_finished(client, "right-1")[0]) == 1


def test_a_request_the_policy_fails_on_is_that_requests_error(start: Start) -> None:
    """The request leaves nothing in the core; a signal that fails raises for its caller alone."""
    client = start()
    client.add_request(core_request("wrong-1", job=JobRef("bad")))
    assert tokens_until_finished(client, "wrong-1") == ([], FinishReason.ERROR)
    client.call_utility("check_invariants")
    with pytest.raises(EngineGenerateError, match="a bad job"):
        client.send_signal(ToolGapStarted("bad")).result()
    client.add_request(core_request("right-1", max_tokens=1))
    assert len(tokens_until_finished(client, "right-1")[0]) == 1


def test_a_failing_call_is_its_callers_error(start: Start) -> None:
    """An unknown utility, or one with wrong arguments, fails that call alone."""
    client = start()
    with pytest.raises(EngineGenerateError, match="no utility 'explode'"):
        client.call_utility("explode")
    with pytest.raises(EngineGenerateError, match="TypeError"):
        client.call_utility("statistics", 1, 2, 3)
    assert client.call_utility("statistics")["num_waiting"] == 0


def test_a_paused_core_waits_and_goes_on(start: Start) -> None:
    """A paused core admits nothing and answers calls; resumed, it serves the waiting request."""
    client = start()
    client.call_utility("pause")
    client.add_request(core_request("a-1", max_tokens=3))
    assert client.call_utility("statistics")["num_waiting"] == 1
    client.call_utility("resume")
    assert len(tokens_until_finished(client, "a-1")[0]) == 3


@pytest.mark.slow
def test_an_idle_core_uses_no_time(start: Start) -> None:
    """An idle core sleeps: in half a second without work it uses at most two of 50 clock ticks.

    Becoming idle is work, too (memory is returned), so the least of a few windows counts.
    """
    client = start()
    client.call_utility("statistics")
    used = []
    for _ in range(4):
        before = cpu_ticks(client.pid)
        assert not has_gone(client.pid, 0.5)  # half a second in which nothing happens
        used.append(cpu_ticks(client.pid) - before)
    assert min(used) <= 2


def test_an_idle_core_wakes_up_for_a_pin(tmp_path: Path) -> None:
    """The pin of the last turn ends at its deadline although no message arrives."""
    told = tmp_path / "told"
    os.mkfifo(told)
    client = SyncMPClient(config(), FakeExecutorFactory(), PinningPolicyFactory(0.2, told))
    try:
        client.await_ready()
        client.add_request(core_request("a-1", max_tokens=2))
        tokens_until_finished(client, "a-1")
        held_s = float(told.read_text())  # blocks until the policy writes
        assert 0.2 <= held_s < 1.0
        statistics = client.call_utility("statistics")
        assert statistics["num_free_blocks"] == statistics["num_blocks"]
    finally:
        client.close()


def cpu_ticks(pid: int) -> int:
    """The CPU time of a process as the kernel counts it: whole ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_what_was_reported_to_a_client_that_has_gone_is_reported_again(start: Start) -> None:
    """The last report of a busy time goes to one client, here to one that has left. It must be repeated, or
    the others would show its requests for ever."""
    client = start()
    notice = msgspec.msgpack.encode(ClientNotice(7))
    client.send_raw(EngineCoreRequestType.JOIN.value, notice)
    client.add_request(core_request("a-1", max_tokens=3))
    tokens_until_finished(client, "a-1")
    client.send_raw(EngineCoreRequestType.LEAVE.value, notice)
    while (stats := client.get_output().scheduler_stats) is None:
        pass
    assert stats.num_running_reqs == 0


def test_both_clients_say_the_same() -> None:
    """The in-process client and the one of another process get the same messages for a request."""
    mp = SyncMPClient(config(), FakeExecutorFactory(), fcfs)
    inproc = InprocClient(config(), FakeExecutorFactory(), fcfs, MonotonicClock())
    said = []
    for client in (mp, inproc):
        client.await_ready()
        client.add_request(core_request("a-1", max_tokens=5))
        outputs = [client.get_output().outputs for _ in range(5)]
        said.append([[(o.request_id, o.new_token_ids, o.finish_reason) for o in each] for each in outputs])
        client.close()
    assert said[0] == said[1]
