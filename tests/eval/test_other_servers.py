"""The load generator against another server, which refuses unknown fields."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.load.records import Recording, read_records
from eval.report.metrics import RunResult
from eval.report.results import read_results
from tests.eval.count_jobs import OUTPUT, count_job, written
from tests.eval.other_server import BOS, FIRST_WORD, STANDARD, Behaviour, OtherServer


def _bench(server: OtherServer, folder: Path, *arguments: str, expect: int = 0) -> RunResult:
    command = ["bench", "--base-url", server.base_url, "--json", str(folder / "result.json")]
    assert main([*command, "--records", str(folder / "records.jsonl"), *arguments]) == expect
    (run,) = read_results(folder / "result.json").runs
    return run


def _records(folder: Path) -> Recording:
    return read_records(folder / "records.jsonl")


def _counts(folder: Path, num_jobs: int = 2) -> str:
    return written(folder / "jobs.jsonl", *(count_job(f"job-{n}") for n in range(num_jobs)))


def test_prompts_have_the_recorded_counts_and_go_on_from_the_servers_own_answers(tmp_path: Path) -> None:
    """Token prompts have the recorded lengths and ordinary tokens; each starts with the last one and the
    server's answer."""
    with OtherServer(Behaviour(adds_bos=True)) as server:
        result = _bench(server, tmp_path, "--workload", _counts(tmp_path, num_jobs=1))
        first, second, third = (turn["prompt"] for turn in server.turns)
        own = [server.tokens(word)[-1] for word in ("indeed", "perhaps", "therefore")] * 4
    assert (result.num_completed_jobs, result.num_errors) == (1, 0)
    assert [len(prompt) for prompt in (first, second, third)] == [100, 150, 230]
    assert min(*first, *second, *third) >= FIRST_WORD > BOS
    assert second[: 100 + OUTPUT] == first + own
    assert third[: 150 + OUTPUT] == second + own
    assert all(turn["ignore_eos"] and turn["min_tokens"] == OUTPUT for turn in server.turns)
    assert [turn.prompt_tokens for turn in _records(tmp_path).turns] == [100, 150, 230]
    assert any("cached and recomputed tokens are unknown" in note for note in result.notes)


@pytest.mark.slow
def test_a_server_of_which_nothing_is_known_gets_standard_fields_only(tmp_path: Path) -> None:
    """Only OpenAI's fields, headers and endpoints are needed, with texts as with counts."""
    plain = Behaviour(owned_by="somebody", fields=STANDARD, tokenizes=False)
    with OtherServer(plain) as server:
        counts = _bench(server, tmp_path, "--workload", _counts(tmp_path), "--token-ids", "50:90")
        texts = _bench(server, tmp_path, "--workload", "synthetic", "--jobs", "2", "--time-scale", "0")
        assert (counts.num_completed_jobs, texts.num_completed_jobs) == (2, 2)
        assert all(turn.keys() == STANDARD - {"messages"} for turn in server.turns if "prompt" in turn)
        assert all(turn.keys() == STANDARD - {"prompt"} for turn in server.turns if "messages" in turn)
        ours = {"Authorization", "X-Session-ID"}
        assert not any(ours & headers.keys() for headers in server.headers)
        chat = [turn["messages"] for turn in server.turns if "messages" in turn]
    assert "no job ids were sent" in counts.notes
    assert any("responses may be shorter" in note for note in counts.notes)
    assert any(
        messages[-2]["content"].startswith(" indeed perhaps") for messages in chat if len(messages) > 2
    )


@pytest.mark.slow
def test_counts_can_be_chats_of_made_text(tmp_path: Path) -> None:
    """With ``--api chat`` synthetic texts have about the recorded numbers of tokens; history only grows."""
    with OtherServer(Behaviour()) as server:
        _bench(server, tmp_path, "--workload", _counts(tmp_path, 1), "--api", "chat")
        chats = [turn["messages"] for turn in server.turns]
        lengths = [len(server.chat_tokens(chat, add_generation_prompt=True)) for chat in chats]
    assert [len(chat) for chat in chats] == [1, 3, 5]
    assert chats[2][:3] == chats[1]
    assert lengths == pytest.approx([100, 150, 230], abs=12)


@pytest.mark.parametrize("identity", ["session_id", "X-Session-ID", "none"])
def test_a_job_is_named_as_asked_or_not_at_all(tmp_path: Path, identity: str) -> None:
    """Each job has one name in all its turns, in the chosen field or header."""
    with OtherServer(Behaviour()) as server:
        _bench(server, tmp_path, "--workload", _counts(tmp_path), "--identity", identity)
        fields = [turn.get("session_id") for turn in server.turns]
        headers = [turn.get("X-Session-ID") for turn in server.headers]
    assert len(server.turns) == 6
    assert len({name for name in fields if name}) == (2 if identity == "session_id" else 0)
    assert len({name for name in headers if name}) == (2 if identity == "X-Session-ID" else 0)


@pytest.mark.slow
def test_the_key_and_extra_fields_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bearer token of a flag or the environment is sent and is in no result; extra fields are sent
    too."""
    locked = Behaviour(api_key="sesame", fields=STANDARD | {"top_k"}, owned_by="somebody")
    with OtherServer(locked) as server:
        arguments = ["--workload", _counts(tmp_path, 1), "--extra-body", '{"top_k": 5}']
        refused = _bench(server, tmp_path, *arguments, expect=1)
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        let_in = _bench(server, tmp_path, *arguments)
        monkeypatch.delenv("OPENAI_API_KEY")
        _bench(server, tmp_path, *arguments, "--api-key", "sesame")
        assert {turn["top_k"] for turn in server.turns} == {5}
    assert (refused.num_errors, let_in.num_errors) == (1, 0)
    assert b"sesame" not in (tmp_path / "result.json").read_bytes()


@pytest.mark.slow
def test_a_busy_server_is_an_error_unless_one_may_ask_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HTTP 503 fails the turn with the server's words; ``--retry-busy`` waits as instructed and retries."""
    workload = _counts(tmp_path, 1)
    with OtherServer(Behaviour(busy_times=1)) as server:
        assert _bench(server, tmp_path, "--workload", workload, expect=1).num_completed_jobs == 0
    assert "HTTP 503: too many requests" in capsys.readouterr().err
    with OtherServer(Behaviour(busy_times=2)) as server:
        assert _bench(server, tmp_path, "--workload", workload, "--retry-busy").num_completed_jobs == 1


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"choices": [{"text": "\xff"}]}\n\ndata: [DONE]\n\n',
        b'data: {"choices": [], "more": ' + b"[" * 100_000 + b"\n\ndata: [DONE]\n\n",
        b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": -1}}\n\ndata: [DONE]\n\n',
        b"data: <html>\n\n",
    ],
)
def test_an_answer_that_cannot_be_read_fails_its_turn_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: bytes
) -> None:
    """For any bytes the other jobs go on, and the result counts the failed turns."""
    with OtherServer(Behaviour(stream=stream)) as server:
        result = _bench(server, tmp_path, "--workload", _counts(tmp_path, 3), expect=1)
    assert (result.num_turns, result.num_errors) == (0, 3)
    assert capsys.readouterr().err.count("turn 1: the response is not in OpenAI's format: ") == 3


def test_answers_without_counts_are_said(tmp_path: Path) -> None:
    """For servers without usage, times are right and token counts are unknown, not zero."""
    stream = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    with OtherServer(Behaviour(stream=stream)) as server:
        result = _bench(server, tmp_path, "--workload", _counts(tmp_path, 1))
    assert (result.num_completed_jobs, result.prompt_tokens) == (1, 0)
    told = "the server reported no token counts for 3 of 3 responses: they count as 0"
    assert told in result.notes


@pytest.mark.parametrize(
    "metrics",
    [
        b"<!doctype html>\n<html>{} 1</html>",
        b"\xff\xfe\x00",
        b"vllm:num_preemptions_total NaN\nvllm:kv_cache_usage_perc +Inf\n",
    ],
)
def test_metrics_that_are_none_are_unknown_figures(tmp_path: Path, metrics: bytes) -> None:
    """An unrelated page under /metrics, or an empty one, does not stop the run."""
    with OtherServer(Behaviour(metrics=metrics)) as server:
        result = _bench(server, tmp_path, "--workload", _counts(tmp_path, 1))
    assert (result.num_completed_jobs, result.num_preemptions, result.kv_usage_at_end) == (1, None, None)


def test_a_server_that_goes_away_ends_the_run_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ended turns are summarized, the count is reported, and no further request is sent."""
    with OtherServer(Behaviour(break_after=4)) as server:
        arguments = ["--workload", _counts(tmp_path, 3), "--concurrency", "1"]
        result = _bench(server, tmp_path, *arguments, expect=1)
    assert (result.num_completed_jobs, result.num_turns, result.num_errors) == (1, 4, 1)
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert "is gone: " in complaint
    assert complaint.endswith("1 of 3 jobs had ended.")
    assert [job.job_id for job in _records(tmp_path).jobs] == ["job-0"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--replies", "forced"], "--replies forced needs a server that takes replay_token_ids"),
        (["--max-context-tokens", "50"], "The limits leave no job of "),
        (["--resume"], "--resume needs --records"),
        (["--reset-prefix-cache"], "does not reset its prefix cache: HTTP 404"),
        (["--arrivals", "poisson"], "--arrivals poisson needs --rate"),
        (["--warmup-jobs", "2"], "--warmup-jobs 2 leaves none of 2 jobs to count."),
        (
            ["--warmup-s", "1000"],
            "--warmup-s 1000 leaves none of 2 jobs to count: the last one arrives after",
        ),
        (["--api-key", "schlüssel"], "The API key has a character that an HTTP header cannot contain."),
        (["--api-key", "sesame\n"], "The API key has a character that an HTTP header cannot contain."),
        (["--json", "/dev/null/x"], "Cannot write the result /dev/null/x: "),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    """The refusal comes before any turn is sent."""
    with OtherServer(Behaviour()) as server:
        command = ["bench", "--base-url", server.base_url, "--workload", _counts(tmp_path)]
        of_options = ("--resume", "--arrivals", "--warmup-jobs", "--warmup-s")
        assert main([*command, *arguments]) == (2 if arguments[0] in of_options else 1)
        assert server.turns == []
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_sums_up_and_the_rest_can_be_done_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C gives exit code 130 with a result. On resuming, a partial last line is dropped with a note, only
    the rest is replayed, and the result covers everything."""
    workload = _counts(tmp_path, 4)
    files = [
        *("--records", str(tmp_path / "records.jsonl")),
        *("--workload", workload, "--concurrency", "1"),
    ]
    with OtherServer(Behaviour(hold_after=7)) as server:
        out = ["--base-url", server.base_url, "--json", str(tmp_path / "interrupted.json")]
        command = [sys.executable, "-m", "continuum.cli", "bench", *out, *files]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert server.holding.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1].count(b"Traceback") == 0
        assert process.returncode == 130
    (interrupted,) = read_results(tmp_path / "interrupted.json").runs
    assert (interrupted.num_completed_jobs, interrupted.num_turns) == (2, 7)
    assert "INTERRUPTED after 2 of 4 jobs" in interrupted.notes

    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    with OtherServer(Behaviour()) as server:
        whole = _bench(server, tmp_path, *files[2:], "--resume")
        assert len(server.turns) == 6
    assert (whole.num_completed_jobs, whole.num_turns, whole.num_errors) == (4, 12, 0)
    assert "2 jobs are done already; its last line was cut off" in capsys.readouterr().err
    recorded = _records(tmp_path)
    assert sorted((turn.job_id, turn.turn) for turn in recorded.turns) == [
        (f"job-{job}", turn) for job in range(4) for turn in (1, 2, 3)
    ]
    # Time continues from the end of the first part.
    assert min(job.start_s for job in recorded.jobs[2:]) >= max(job.end_s for job in recorded.jobs[:2])


@pytest.mark.slow
def test_a_full_disk_ends_the_records_and_not_the_run(tmp_path: Path) -> None:
    """All jobs are replayed and summarized; exit code 1, one sentence, and a file to resume from."""
    path = tmp_path / "records.jsonl"
    with OtherServer(Behaviour()) as server:
        flags = ["--base-url", server.base_url, "--workload", _counts(tmp_path, 4), "--records", str(path)]
        command = shlex.join([sys.executable, "-m", "continuum.cli", "bench", *flags])
        # A limit on the size of files, in KiB, stands in for a full disk.
        ended = subprocess.run(
            ["bash", "-c", f"ulimit -f 2; {command}"], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, len(server.turns)) == (1, 12)
        assert ended.stderr.splitlines()[-1] == "error: result: the records end early: File too large"
        assert "jobs completed" in ended.stdout
        assert path.stat().st_size == 2048
        whole = _bench(server, tmp_path, *flags[2:], "--resume")
    assert (whole.num_completed_jobs, whole.num_turns) == (4, 12)
    assert len(_records(tmp_path).turns) == 12


def test_records_that_cannot_be_begun_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a folder has the file's name, there is one sentence before any turn, and no other file."""
    folder = tmp_path / "records"
    folder.mkdir()
    workload = _counts(tmp_path)
    with OtherServer(Behaviour()) as server:
        command = ["bench", "--base-url", server.base_url, "--workload", workload]
        assert main([*command, "--records", str(folder)]) == 1
        assert server.turns == []
    assert f"Cannot write the records {folder}: Is a directory." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.jsonl", "records"]


@pytest.mark.slow
def test_the_records_of_another_run_are_not_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names what differs; a foreign or damaged file is refused too."""
    path = tmp_path / "records.jsonl"
    with OtherServer(Behaviour()) as server:
        command = ["bench", "--base-url", server.base_url, "--workload", _counts(tmp_path)]
        command += ["--records", str(path)]
        assert main(command) == 0
        good = path.read_bytes()
        assert main([*command, "--resume", "--time-scale", "2"]) == 1
        assert "is of another run and cannot be resumed: --time-scale was 1.0 and is 2.0." in _told(capsys)
        path.write_bytes(good.partition(b"\n")[2])
        assert main([*command, "--resume"]) == 1
        assert "does not name its run" in _told(capsys)
        path.write_bytes(good.replace(b'"turn":2', b'"turn":"x"', 1))
        assert main([*command, "--resume"]) == 1
        assert ": not a record: Expected `int`, got `str` - at `$.turn`." in _told(capsys)
        assert len(server.turns) == 6


def _told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_job_that_is_too_long_is_cut_or_left_out_and_both_are_said(tmp_path: Path) -> None:
    """Of three jobs one fits, one is cut before its long turn, one is left out before any are drawn."""
    jobs = (count_job("fits"), count_job("cut", (100, 3990)), count_job("out", (4010,)))
    with OtherServer(Behaviour()) as server:
        result = _bench(server, tmp_path, "--workload", written(tmp_path / "jobs.jsonl", *jobs))
    assert (result.num_completed_jobs, result.num_turns) == (2, 4)
    assert "1 jobs were LEFT OUT: their context passes 4000 tokens" in result.notes
    assert "1 jobs were CUT to fewer turns" in result.notes


def test_sub_agents_start_when_the_turn_ends_and_are_waited_for(tmp_path: Path) -> None:
    """The parent's next turn follows the last answer of all jobs it started, for any concurrency."""
    parent = count_job("parent")
    turns = (replace(parent.turns[0], spawns=("child-a", "child-b")), *parent.turns[1:])
    children = [replace(count_job(name), parent_job="parent") for name in ("child-a", "child-b")]
    workload = written(tmp_path / "jobs.jsonl", replace(parent, turns=turns), *children)
    with OtherServer(Behaviour()) as server:
        _bench(server, tmp_path, "--workload", workload, "--concurrency", "1")
    recorded = _records(tmp_path)
    first, second, _ = (turn for turn in recorded.turns if turn.job_id == "parent")
    for name in ("child-a", "child-b"):
        (job,) = (job for job in recorded.jobs if job.job_id == name)
        assert job.parent_job == "parent"
        assert first.start_s + first.latency_s <= job.start_s <= job.end_s <= second.start_s


@pytest.mark.slow
def test_the_warm_up_is_replayed_but_not_counted(tmp_path: Path) -> None:
    """Jobs of the warm-up are marked in the records; the result has only the others, timed from 0."""
    with OtherServer(Behaviour()) as server:
        arguments = ["--workload", _counts(tmp_path, 3), "--concurrency", "1", "--warmup-jobs", "1"]
        result = _bench(server, tmp_path, *arguments)
        assert len(server.turns) == 9
    assert (result.num_jobs, result.num_turns) == (2, 6)
    assert [job.warmup for job in _records(tmp_path).jobs] == [True, False, False]
    assert result.jobs[0].start_s < 0.01
    assert any(note.startswith("warm-up: 1 jobs") for note in result.notes)


def test_a_warm_up_longer_than_the_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason appears below the table of dashes, as it was not known before: jobs waited for slots."""
    with OtherServer(Behaviour()) as server:
        arguments = ["--workload", _counts(tmp_path), "--concurrency", "1", "--warmup-s", "1000"]
        result = _bench(server, tmp_path, *arguments, expect=1)
    assert "error: result: no job was counted, all began during the warm-up" in capsys.readouterr().err
    assert (result.num_jobs, result.num_turns) == (0, 0)
    assert "the warm-up lasted until the end: NOTHING is counted" in result.notes


@pytest.mark.slow
def test_an_open_loop_lets_jobs_in_at_its_times(tmp_path: Path) -> None:
    """The same seed gives the same arrivals; no job starts before its arrival."""
    with OtherServer(Behaviour()) as server:
        arguments = ["--workload", _counts(tmp_path, 5), "--rate", "20", "--seed", "3"]
        result = _bench(server, tmp_path, *arguments)
    starts = [job.start_s for job in result.jobs]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0] + 0.02
    assert result.setting.jobs_per_s == 20


def test_records_are_lines_with_a_kind(tmp_path: Path) -> None:
    """Each line has a kind: the run first, then turns and jobs as they ended, for jq, pandas and others."""
    with OtherServer(Behaviour()) as server:
        _bench(server, tmp_path, "--workload", _counts(tmp_path, 1))
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "turn", "turn", "turn", "job"]
    assert lines[0]["settings"]["--server"] == "vllm"
