"""Jobs with counts against the real server: token counts and cache hits are as recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.load.records import TurnRecord, read_records, told
from eval.report.metrics import RunResult
from eval.report.results import read_results
from eval.workloads.job import Job
from tests.eval.count_jobs import OUTPUT, count_job, written

BLOCK = 16


def _bench(
    base_url: str, folder: Path, jobs: list[Job], *arguments: str
) -> tuple[RunResult, dict[str, list[TurnRecord]]]:
    """Replays the jobs one after another; returns the turns of each."""
    command = ["bench", "--base-url", base_url, "--workload", written(folder / "jobs.jsonl", *jobs)]
    command += ["--json", str(folder / "result.json"), "--records", str(folder / "records.jsonl")]
    assert main([*command, "--concurrency", "1", *arguments]) == 0
    turns: dict[str, list[TurnRecord]] = {}
    for turn in read_records(folder / "records.jsonl").turns:
        turns.setdefault(turn.job_id, []).append(turn)
    (run,) = read_results(folder / "result.json").runs
    return run, turns


def _cut_to_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("replies", ["forced", "live"])
def test_the_server_counts_what_was_recorded_and_finds_the_recorded_prefix(
    server: str, tmp_path: Path, replies: str
) -> None:
    """Prompt, output and cached tokens of every turn are exact, with forced and with free answers."""
    job = count_job(f"exact-{replies}", (100, 150, 231, 400))
    # The third turn keeps only part of the second, as if the context was edited.
    turns = (*job.turns[:2], replace(job.turns[2], prefix_tokens=120), job.turns[3])
    result, by_job = _bench(server, tmp_path, [replace(job, turns=turns)], "--replies", replies)
    records = by_job[job.job_id]
    assert [turn.prompt_tokens for turn in records] == [100, 150, 231, 400]
    assert [turn.output_tokens for turn in records] == [OUTPUT] * 4
    # The last token of an answer is never computed, so 111 of 100 + 12 tokens can be cached.
    shared = [0, 100 + OUTPUT - 1, 120, 231 + OUTPUT - 1]
    assert [turn.cached_tokens for turn in records] == [_cut_to_blocks(tokens) for tokens in shared]
    assert all(told(turn.recomputed_tokens) <= BLOCK for turn in records)
    assert result.num_unlike_recording == (0 if replies == "forced" else 4)


def test_the_server_sees_which_tool_runs(server: str, tmp_path: Path) -> None:
    """A forced answer ends with the recorded call, so the server predicts a gap that it has seen before."""
    job = count_job("calls", (100, 150, 200, 250, 300), output=30)
    _, by_job = _bench(server, tmp_path, [job])
    *_, before_last, _ = by_job["calls"]
    assert before_last.receipt is not None
    assert before_last.receipt.expected_tool_s is not None
    assert before_last.receipt.pinned_tokens > 0


def test_jobs_share_what_the_recording_says_they_share(server: str, tmp_path: Path) -> None:
    """Equal blocks of a scope, and a shared prefix, have equal tokens; other tokens of two jobs differ."""
    blocks = ((1, 5),)
    first = count_job("blocks-1", (100,))
    first = replace(first, block_size=BLOCK, block_scope="trace")
    first = replace(first, turns=(replace(first.turns[0], block_runs=((1, 6),)),))
    second = replace(
        first, job_id="blocks-2", turns=(replace(first.turns[0], block_runs=(*blocks, (77, 1))),)
    )
    apart = replace(first, job_id="blocks-3", block_scope="another trace")
    agent = replace(count_job("agent-1", (200,)), shared_prefix="agent", shared_prefix_tokens=130)
    alike = replace(agent, job_id="agent-2")
    alone = count_job("alone", (200,))
    jobs = [first, second, apart, agent, alike, alone]
    _, turns = _bench(server, tmp_path, jobs)
    cached = {name: of_job[0].cached_tokens for name, of_job in turns.items()}
    assert cached == {
        "blocks-1": 0,
        "blocks-2": 5 * BLOCK,
        "blocks-3": 0,
        "agent-1": 0,
        "agent-2": _cut_to_blocks(130),
        "alone": 0,
    }


def test_counts_go_through_the_chat_door_too(server: str, tmp_path: Path) -> None:
    """Through chats, synthetic texts have about the recorded counts, calls are parsed and prefixes found."""
    result, by_job = _bench(server, tmp_path, [count_job("chatty", (150, 250, 400))], "--api", "chat")
    turns = by_job["chatty"]
    assert [turn.prompt_tokens for turn in turns] == pytest.approx([150, 250, 400], rel=0.1)
    assert all(told(turn.recomputed_tokens) <= BLOCK for turn in turns)
    assert (result.num_unlike_recording, result.num_pinned_turns) == (0, 2)


def test_hermes_calls_are_parsed_by_the_server(server: str, tmp_path: Path) -> None:
    """With declared tools the answer ends as a tool call, and equals the forced text."""
    job = count_job("hermes", (300, 500))
    result, by_job = _bench(server, tmp_path, [job], "--api", "chat", "--calls", "hermes")
    assert [turn.finish_reason for turn in by_job["hermes"]] == ["tool_calls", "stop"]
    assert result.num_unlike_recording == 0
    assert all(told(turn.recomputed_tokens) <= BLOCK for turn in by_job["hermes"])


@pytest.mark.slow
def test_without_a_name_a_job_is_recognized_by_its_tokens(server: str, tmp_path: Path) -> None:
    """With ``--identity none`` the tokens are the same, and the server infers that the turns are one job."""
    _, by_job = _bench(server, tmp_path, [count_job("nameless")], "--identity", "none")
    receipts = [turn.receipt for turn in by_job["nameless"] if turn.receipt is not None]
    assert [receipt.turn for receipt in receipts] == [1, 2, 3]
    assert len({receipt.job_id for receipt in receipts}) == 1
    assert [turn.prompt_tokens for turn in by_job["nameless"]] == [100, 150, 230]


def test_a_run_can_begin_with_an_empty_cache(server: str, tmp_path: Path) -> None:
    """A second run finds the first one's prompts cached, unless it requests a reset."""
    job = count_job("again", (100,))
    cached = []
    for arguments in ((), (), ("--reset-prefix-cache",)):
        _, by_job = _bench(server, tmp_path, [job], *arguments)
        cached.append(by_job["again"][0].cached_tokens)
    assert cached == [0, 96, 0]


def test_what_was_served_can_be_simulated_and_set_beside_it(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's records can be simulated; both runs have one load, so their ratio is shown."""
    result, _ = _bench(server, tmp_path, [count_job("twice"), count_job("again twice")])
    records, simulated = str(tmp_path / "records.jsonl"), str(tmp_path / "simulated.json")
    command = ["simulate", "--workload", records, "--concurrency", "1", "--policies", "fcfs"]
    assert main([*command, "--json", simulated]) == 0
    (again,) = read_results(Path(simulated)).runs
    assert (again.num_turns, again.prompt_tokens) == (result.num_turns, result.prompt_tokens)
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "result.json"), simulated]) == 0
    assert capsys.readouterr().out.count("up to 1 at once") == 1


def test_a_call_is_said_where_it_parts_nothing_that_jobs_share(server: str, tmp_path: Path) -> None:
    """An answer whose blocks only this job has ends with its call; one with shared blocks stays unchanged."""

    def job(name: str, after: tuple[int, int]) -> Job:
        first, second = count_job(name, (80, 144), output=48).turns
        turns = (replace(first, block_runs=((1, 5),)), replace(second, block_runs=((1, 5), after)))
        return replace(count_job(name), turns=turns, block_size=BLOCK, block_scope="calls")

    own, shared, also = job("call-1", (100, 4)), job("call-2", (200, 4)), job("call-3", (200, 4))
    result, by_job = _bench(server, tmp_path, [own, shared, also])
    assert (
        "2 tool calls are invisible to the server: the recorded output has no space for them" in result.notes
    )
    pinned = [turns[0].receipt.reason for turns in by_job.values() if turns[0].receipt is not None]
    assert [reason.startswith("no tool call") for reason in pinned] == [False, True, True]
    # The second turn of the last job begins with the tokens of the first.
    assert told(by_job["call-3"][1].cached_tokens) >= 128 - BLOCK
