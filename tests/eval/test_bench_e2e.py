"""The load generator against the real server: a separate process, a tiny model, real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.load.client import ServerClient
from eval.load.conversation import ChatConversation, ChatTurn
from eval.load.planner import Limits, Plan, Planner, PlanOptions
from eval.load.records import TurnRecord, read_records, told
from eval.load.server_metrics import ServerMetrics
from eval.report.metrics import RunResult
from eval.report.results import read_results
from eval.workloads.job import Job
from eval.workloads.synthetic import SyntheticConfig, make_jobs
from tests.eval.conftest import MAX_MODEL_LEN, NUM_BLOCKS

pytestmark = pytest.mark.slow


def _metrics(base_url: str) -> ServerMetrics:
    async def read() -> ServerMetrics:
        async with ServerClient(base_url) as client:
            return await client.metrics()

    return asyncio.run(read())


def _planned_chats(base_url: str, limits: Limits, jobs: list[Job]) -> list[Sequence[ChatTurn]]:
    async def plan() -> Plan:
        async with ServerClient(base_url) as client:
            await client.connect()
            return await Planner(client, PlanOptions(limits=limits)).plan(jobs)

    conversations = (planned.conversation for planned in asyncio.run(plan()).jobs)
    return [chat.turns for chat in conversations if isinstance(chat, ChatConversation)]


def _bench(base_url: str, folder: Path, *arguments: str) -> tuple[RunResult, list[TurnRecord]]:
    """Runs the command as a user would; returns what it wrote."""
    result, records = folder / "result.json", folder / "records.jsonl"
    command = ["bench", "--base-url", base_url, "--workload", "synthetic", "--json", str(result)]
    assert main([*command, "--records", str(records), *arguments]) == 0
    (run,) = read_results(result).runs
    return run, read_records(records).turns


def test_jobs_at_once_are_all_served_and_every_block_comes_back(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no error, every answer is as recorded, and the pool has no pin left when the last job ends."""
    before = _metrics(server)
    result, records = _bench(server, tmp_path, "--jobs", "4", "--time-scale", "0.1", "--max-turns", "4")
    assert (result.num_completed_jobs, result.num_errors, result.num_unlike_recording) == (4, 0, 0)
    assert len(records) == result.num_turns == 16
    assert all(record.finish_reason == "stop" for record in records)
    assert told(result.cached_tokens) > 0
    assert all(record.receipt is not None for record in records)
    assert result.num_pinned_turns is not None
    assert result.num_pinned_turns > 0
    assert sum(result.pins_ended.values()) > 0

    assert result.kv_usage_at_end == 0.0
    after = _metrics(server)
    assert (after.idle, after.kv_usage, after.pins) == (True, 0.0, 0.0)
    assert (after.block_size, after.num_blocks) == (16, NUM_BLOCKS - 1)
    # The held block-seconds equal the server's own count while the jobs ran.
    held_block_s = {
        cause: block_s - before.pin_block_s.get(cause, 0.0) for cause, block_s in after.pin_block_s.items()
    }
    assert held_block_s.pop("handed_over") > 0
    assert result.held_in_vain_share == pytest.approx(
        sum(held_block_s.values()) / ((NUM_BLOCKS - 1) * result.wall_s)
    )
    printed = capsys.readouterr()
    assert "ASSUMED" in printed.out
    assert "jobs 4/4  turns 16/16" in printed.err


def test_a_lone_job_gets_its_own_prefix_back(server: str, tmp_path: Path) -> None:
    """Recorded answers are forced and rendered, so each prompt starts with the whole previous turn."""
    _, records = _bench(
        server, tmp_path, "--jobs", "1", "--seed", "5", "--time-scale", "0", "--max-turns", "4"
    )
    assert [record.turn for record in records] == [1, 2, 3, 4]
    # The last token of an answer is not computed, and only whole blocks are kept.
    assert all(told(record.recomputed_tokens) <= 16 for record in records)


def test_loads_are_run_one_after_another_and_held_to_an_slo(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each load is a run of the result, and a line says whether it kept the SLO, with the waits."""
    out = tmp_path / "out.json"
    given = ["--workload", "synthetic", "--jobs", "2", "--max-turns", "2", "--time-scale", "0.1"]
    loads = ["--concurrency", "1,2", "--reset-prefix-cache", "--json", str(out)]
    assert main(["bench", "--base-url", server, *given, *loads, "--slo", "return=50ms,tpot=100"]) == 0
    runs = read_results(out).runs
    assert [run.setting.concurrency for run in runs] == [1, 2]
    assert all(run.num_completed_jobs == 2 for run in runs)
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index(
        "SLO: p95 of TTFT of first turns within 30 s, and of TTFT of returning turns within 0.05 s, and of "
        "time per output token within 100 s"
    )
    for run, line in zip(runs, lines[begin + 1 :], strict=True):
        assert run.returning_ttft_s is not None
        p95 = run.returning_ttft_s.p95
        assert line.startswith(f"  up to {run.setting.concurrency} at once: ")
        assert f"return {p95:,.3f} s" in line
        assert ("kept" in line) == (p95 <= 0.05)


def test_without_answers_there_is_no_verdict(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's refusals are printed, and the exit code is that of failed turns."""
    given = [
        "--workload",
        "synthetic",
        "--jobs",
        "1",
        "--max-turns",
        "2",
        "--extra-body",
        '{"temperature": -5}',
    ]
    assert main(["bench", "--base-url", server, *given, "--slo", "return=1"]) == 1
    printed = capsys.readouterr()
    assert "temperature" in printed.err
    (line,) = (line for line in printed.out.splitlines() if line.startswith("  all jobs at once: "))
    assert line.startswith("  all jobs at once: broken (first not measured, return not measured, ")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--slo", "p99=2"], "argument --slo: 'p99' is none of first, return, tpot"),
        (["--concurrency", "2,2"], "argument --concurrency: has a number twice: 2,2"),
        (["--concurrency", "2,all"], "argument --concurrency: must be whole numbers or all, got '2,all'"),
        (["--rate", "1,2"], "Several loads need --reset-prefix-cache"),
        (
            ["--rate", "1,2", "--reset-prefix-cache", "--records", "x"],
            "--records has the turns of a single run, but 2 were requested.",
        ),
    ],
)
def test_loads_that_cannot_be_are_one_sentence(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: int | str | None = main(["bench", "--workload", "synthetic", *flags])
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.long
def test_without_job_ids_jobs_are_recognized(server: str, tmp_path: Path) -> None:
    """With ``--no-job-id`` the turns of an agent unaware of us are still pinned and found."""
    result, records = _bench(server, tmp_path, "--jobs", "2", "--max-turns", "2", "--no-job-id")
    assert (result.num_completed_jobs, result.num_pinned_turns) == (2, 4)
    assert result.pins_ended["handed_over"] == 2
    assert all(told(record.recomputed_tokens) <= 16 for record in records)
    assert "no job ids were sent" in result.notes


def test_a_job_is_cut_at_the_last_turn_that_fits(server: str, tmp_path: Path) -> None:
    """Prompt plus output never exceed the limit, and the report says that jobs were cut."""
    result, records = _bench(server, tmp_path, "--jobs", "2", "--max-context-tokens", "1600")
    assert (result.num_completed_jobs, result.num_cut_jobs) == (2, 2)
    contexts = [record.prompt_tokens + record.output_tokens for record in records]
    assert max(contexts) <= 1600
    last = max(records, key=lambda record: (record.job_id, record.turn))
    assert last.gap_s is None


def test_a_shortened_output_keeps_its_command(server: str) -> None:
    """With few tokens left the reasoning is cut first, so that the tool parser still finds the command."""
    jobs = make_jobs(SyntheticConfig(num_jobs=2))
    limits = Limits(max_output_tokens=45, max_turns=3, max_context_tokens=MAX_MODEL_LEN)
    for job, turns in zip(jobs, _planned_chats(server, limits, jobs), strict=True):
        assert len(turns) > 1
        for recorded, planned in zip(job.turns, turns, strict=False):
            assert planned.output_token_ids is not None
            # The end of the turn, and a seam that tokenizes differently.
            assert len(planned.output_token_ids) <= 45 + 3
            assert recorded.output_text is not None
            assert planned.output_text.endswith(recorded.output_text[recorded.output_text.index("```bash") :])


def test_a_model_that_is_not_served_is_one_sentence(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists the served names."""
    assert main(["bench", "--base-url", server, "--workload", "synthetic", "--model", "gpt-9"]) == 1
    assert "does not serve 'gpt-9' but tiny." in capsys.readouterr().err


def test_the_demo_ends_with_the_policies_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command makes the model, serves it under each policy and writes traces, records and results."""
    sizes = ["--hidden-size", "64", "--layers", "2", "--jobs", "3", "--max-turns", "2", "--time-scale", "0.1"]
    assert main(["demo", "--workload", "synthetic", "--out", str(tmp_path), *sizes]) == 0
    printed = capsys.readouterr().out
    assert "continuum / fcfs" in printed
    for policy in ("fcfs", "continuum"):
        (run,) = read_results(tmp_path / policy / "result.json").runs
        assert run.num_completed_jobs == 3
        for name in ("trace.jsonl", "records.jsonl", "server.log"):
            assert (tmp_path / policy / name).stat().st_size > 0
