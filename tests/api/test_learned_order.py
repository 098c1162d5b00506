"""A real server and its trainer learn the amount of work per job from jobs that end."""

from __future__ import annotations

import os
import select
from pathlib import Path

import httpx
import pytest

from continuum.cli.main import main
from continuum.learning.remaining_work import MIN_NEW_JOBS
from estimator.state import load_learned
from tests.api.server import Server, running_server
from tests.child_processes import children_of
from tests.processes.support import until
from tracing.events import JobEvent, SignalEvent
from tracing.reader import read_trace

TRAINER = "estimator.learned.trainer"


def run_job(http: httpx.Client, name: str, num_turns: int) -> None:
    messages = [{"role": "user", "content": f"task {name}"}]
    for number in range(num_turns):
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "job_id": name}
        answer = http.post("/v1/chat/completions", json={**body, "is_last_step": number + 1 == num_turns})
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": f"go on {number}"})


def _trainer_has_ended(server: Server) -> None:
    """Waits without using CPU time, as the trainer runs at low priority."""
    core = server.core_pid()
    until(lambda: bool(children_of(core, TRAINER)))
    (trainer,) = children_of(core, TRAINER)
    process = os.pidfd_open(trainer)
    try:
        select.select([process], [], [], 60)
    finally:
        os.close(process)


@pytest.mark.slow
def test_a_server_learns_in_a_process_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    """The learned model enters the trace, which replays, and the state file on shutdown; the next server
    predicts from the first turn on. With learning off nothing is learned."""
    trace, state, second = tmp_path / "trace.jsonl", tmp_path / "state.json", tmp_path / "second.jsonl"
    with running_server(model_folder, "--trace", str(trace), "--estimator-state", str(state)) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(MIN_NEW_JOBS):
                run_job(http, f"job{number}", 1 + number % 4)
            _trainer_has_ended(server)
            until(lambda: b'"model_learned"' in trace.read_bytes())
        assert server.interrupt() == 0
    model = load_learned(state).work_model
    assert model is not None
    assert model.num_jobs == MIN_NEW_JOBS
    learned = [event for event in read_trace(trace) if isinstance(event, SignalEvent) and event.model]
    assert [event.kind for event in learned] == ["model_learned"]
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0

    flags = ("--trace", str(second), "--estimator-state", str(state), "--no-learn-order")
    with running_server(model_folder, *flags) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(MIN_NEW_JOBS):
                run_job(http, f"new{number}", 2)
        assert server.interrupt() == 0
    after = load_learned(state).work_model
    assert after == model
    arrived = [e for e in read_trace(second) if isinstance(e, JobEvent) and e.kind == "turn_arrived"]
    is_believed = model.right > max(0.5, model.right_by_age)
    assert (arrived[0].predicted_excess_s is not None) == is_believed
    assert main(["trace", "replay", str(second)]) == 0
