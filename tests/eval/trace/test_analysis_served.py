"""A served trace against the clients' own records: a real server, real HTTP, real jobs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from eval.load.records import Recording, read_records
from eval.trace.analysis.jobs import JobLife, TurnEnd, TurnLife
from eval.trace.analysis.lives import Lives, read_lives
from tests.api.server import running_server
from tests.eval.trace.same_numbers import check_same_numbers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]  # A server starts and serves 22 turns before the first test.

NUM_BLOCKS = 300
"""Blocks of 16 tokens: fewer than the jobs need at once."""
NUM_QUESTIONS = 6
EDGE_S = 3.0
"""The time that a job may spend outside of the engine at its two ends, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Served:
    """One run of a server."""

    trace: Path
    lives: Lives
    records: Recording

    def job(self, name: str) -> JobLife:
        (found,) = [job for job in self.lives.jobs() if plain(job.job_id) == name]
        return found


def plain(job_id: str) -> str:
    """The id without the load generator's mark, which keeps runs apart."""
    return job_id.partition(".")[0]


def ask(url: str, job_id: str | None, text: str, **fields: object) -> dict[str, Any]:
    """Sends a turn of a job with its whole prompt."""
    body = {
        "prompt": text,
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0,
        **({} if job_id is None else {"job_id": job_id}),
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", **body}, timeout=90)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Jobs of the load generator, unnamed questions, a job with overlapping turns, one that rewrites its
    history, and one whose client disconnects."""
    folder = tmp_path_factory.mktemp("served")
    trace, records = folder / "trace.jsonl", folder / "records.jsonl"
    flags = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--trace", str(trace), "--max-num-seqs", "4")
    with running_server(model, *flags, log=folder / "log") as server:
        command = ["bench", "--base-url", server.url, "--workload", "synthetic", "--records", str(records)]
        assert main([*command, "--jobs", "4", "--max-turns", "4", "--time-scale", "0.1"]) == 0
        for number in range(NUM_QUESTIONS):
            ask(server.url, None, f"What is {number} times {number}? " * 5)
        beginning = "The tests of the parser fail. " * 20
        with ThreadPoolExecutor(3) as threads:
            prompts = [f"{beginning} Look at file {number}. " * 2 for number in range(3)]
            list(threads.map(lambda text: ask(server.url, "side-by-side", text, max_tokens=200), prompts))
        ask(server.url, "parted", beginning * 2 + "First this.")
        ask(server.url, "parted", beginning + "Something else now. " * 40)
        body = {
            "model": "tiny",
            "prompt": "x",
            "job_id": "hung-up",
            "max_tokens": 3000,
            "ignore_eos": True,
        }
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.3))
        ask(server.url, "after", "The engine is still there.")
        server.interrupt()
    lives = Lives()
    read_lives(trace, lives)
    return Served(trace, lives, read_records(records))


def test_turns_are_those_that_the_clients_saw(served: Served) -> None:
    """Token counts are exact; the engine's times are within the client's."""
    jobs = {plain(job.job_id): job for job in served.lives.jobs()}
    assert len(served.records.turns) == 16
    for record in served.records.turns:
        turn = jobs[record.job_id].turns[record.turn - 1]
        assert turn.num_prompt_tokens == record.prompt_tokens
        assert turn.num_output_tokens == record.output_tokens
        assert turn.cached_tokens == record.cached_tokens
        assert record.receipt is not None
        assert turn.recomputed_tokens == record.receipt.recomputed_tokens
        assert turn.duration_s <= record.latency_s
        assert record.latency_s - turn.duration_s < EDGE_S
        assert turn.ttft_s is not None
        assert record.ttft_s is not None
        assert turn.ttft_s <= record.ttft_s


def test_jobs_take_as_long_as_their_clients_say(served: Served) -> None:
    """The wall time is from the first arrival to the last token, and is fully accounted for."""
    for record in served.records.jobs:
        job = served.job(record.job_id)
        assert len(job.turns) == record.num_turns
        assert job.wall_s <= record.completion_s
        assert record.completion_s - job.wall_s < EDGE_S
    for job in served.lives.jobs():
        assert job.seconds.total_s == pytest.approx(job.wall_s, abs=1e-9)
        assert all(turn.seconds.total_s == pytest.approx(turn.duration_s, abs=1e-9) for turn in job.turns)


def test_gaps_are_what_the_client_waited(served: Served) -> None:
    """Gaps are those of the load generator's calls, plus the network and its own time."""
    by_turn = {(record.job_id, record.turn): record for record in served.records.turns}
    checked = 0
    for record in served.records.jobs:
        for gap in served.job(record.job_id).gaps:
            waited_s = by_turn[record.job_id, gap.number].gap_s
            if gap.duration_s is not None and waited_s is not None:
                checked += 1
                assert waited_s <= gap.duration_s < waited_s + EDGE_S
                assert gap.tools
    assert checked == 12


def test_turns_side_by_side(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The turns' times add up to more than the job's; the job's account is complete and says so."""
    job = served.job("side-by-side")
    assert len(job.turns) == 3
    assert job.overlaps
    assert sum(turn.duration_s for turn in job.turns) > job.wall_s
    assert job.seconds.total_s == pytest.approx(job.wall_s, abs=1e-9)
    assert main(["trace", "explain", str(served.trace), "side-by-side"]) == 0
    assert "ran in parallel" in " ".join(capsys.readouterr().out.split())


def test_a_prompt_that_parts_from_the_one_before(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The divergence is reported; Mooncake's export makes it a separate session, which can be read back."""
    turn = served.job("parted").turns[1]
    assert turn.diverged_at_token is not None
    assert main(["trace", "explain", str(served.trace), "parted"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"diverges from what the job had computed at token {turn.diverged_at_token:,}" in told
    out = tmp_path / "rows.jsonl"
    assert main(["trace", "export", str(served.trace), "--format", "mooncake", "--out", str(out)]) == 0
    sessions = [json.loads(line)["session_id"] for line in out.read_text().splitlines()]
    assert {"parted", "parted#2"} <= set(sessions)
    assert main(["workload", str(out)]) == 0


def test_a_client_that_hangs_up(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The client's turn is aborted, its time is accounted for, and nothing of it was pinned."""
    (turn,) = served.job("hung-up").turns
    assert turn.end is TurnEnd.ABORTED
    assert served.job("hung-up").pins == ()
    assert main(["trace", "explain", str(served.trace), "hung-up"]) == 0
    assert "was aborted after" in capsys.readouterr().out


def test_the_trace_is_complete(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace is complete from the engine's start to its end, and has its start date."""
    assert main(["trace", "summary", str(served.trace), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["file"]["complete"], summary["file"]["faults"]
    assert summary["file"]["began"].endswith("UTC")
    turns: list[TurnLife] = served.lives.turns
    assert sum(summary["turns_by_end"].values()) == len(turns)
    assert summary["pool"]["most_pinned"] <= 1


def test_the_same_numbers_whoever_is_asked(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers agree for a trace with overlapping turns of a job."""
    check_same_numbers(served.trace, capsys)


def test_the_same_policy_comes_to_what_was_recorded(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulated from the trace, its own policy ends pins as recorded and pins nothing for unnamed questions.
    Overlapping turns, which are simulated one after another, are an exception."""
    capsys.readouterr()
    assert main(["trace", "replay", str(served.trace), "--policy", "fcfs"]) == 0
    table = capsys.readouterr().out

    def figures(label: str) -> tuple[float, float]:
        line = next((line for line in table.splitlines() if line.startswith(label)), f"{label} 0 0 0")
        again, _, recorded = line[len(label) :].split()[:3]
        return float(again.replace(",", "")), float(recorded.replace(",", ""))

    for label in ("  pins expired", "  pins handed over", "  pins released"):
        again, recorded = figures(label)
        assert again == pytest.approx(recorded, abs=2), label
    assert figures("  pins released")[1] > NUM_QUESTIONS
    again, recorded = figures("KV pinned but wasted, token-s")
    assert again == pytest.approx(recorded, rel=0.5)
