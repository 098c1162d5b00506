"""Files of other tools, and our own traces and records, are recognized by their content and read."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum.cli.main import main
from eval.errors import WorkloadError
from eval.load.records import JobRecord, RunHeader, TurnRecord
from eval.workloads.catalog import RecordedWorkload, open_workload
from eval.workloads.job import GapKind, ToolRun, Turn
from eval.workloads.transcript import ASSUMED_OUTPUT_TOKENS
from tests.eval.workloads.jobs import SHARED, written
from tracing.events import (
    JobEvent,
    PinEvent,
    ReportedToolCall,
    RequestArrived,
    RequestsEnded,
    SignalEvent,
    TraceHeader,
)
from tracing.writer import TraceWriter

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def opened(path: Path) -> RecordedWorkload:
    """Opens the file by its content."""
    workload = open_workload(str(path))
    assert isinstance(workload, RecordedWorkload)
    return workload


def counts(turns: tuple[Turn, ...]) -> list[tuple[int, int, int]]:
    """Prompt, known part of it and output of each turn."""
    return [(turn.input_tokens, turn.prefix_tokens, turn.output_tokens) for turn in turns]


# ---- Mooncake ----


def _request(timestamp: int, input_length: int, hash_ids: list[int], **fields: object) -> dict[str, object]:
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": 50, "hash_ids": hash_ids}
    return row | fields


def test_mooncake_requests_become_sessions_by_their_blocks(tmp_path: Path) -> None:
    """A prompt that begins with all full blocks of an earlier one continues it; one shared block is not
    enough."""
    path = written(
        tmp_path / "trace.jsonl",
        _request(1000, 1100, [0, 1, 2]),
        _request(2000, 1200, [0, 7, 8]),
        _request(4500, 2100, [0, 1, 3, 4, 5]),
    )
    workload = opened(path)
    first, second = workload.jobs
    assert counts(first.turns) == [(1100, 0, 50), (2100, 1024, 50)]
    assert (first.arrival_s, second.arrival_s) == (1.0, 2.0)
    assert (first.turns[0].gap_kind, first.turns[0].gap_s) == (GapKind.UNKNOWN, 3.5)
    assert not first.turns[0].gap_measured  # It includes the time of the answer.
    assert first.turns[1].block_runs == ((0, 2), (3, 2))  # The fifth block is not full.
    assert first.block_scope == second.block_scope
    assert workload.notes == ["sessions are INFERRED from block ids: 3 requests became 2 jobs"]


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the recorded workloads are not beside the repository")
def test_inferred_sessions_are_those_that_others_inferred(tmp_path: Path) -> None:
    """Split into single requests, the recorded conversations are found again, except for one percent."""
    recorded = opened(SHARED / "mooncake-conversation.jsonl").jobs
    rows: list[tuple[float, dict[str, object]]] = []
    for job in recorded:
        assert job.arrival_s is not None
        now = job.arrival_s
        for turn in job.turns:
            ids = [block for first, count in turn.block_runs for block in range(first, first + count)]
            rows.append((now, _request(round(now * 1000), turn.input_tokens, ids)))
            now += turn.gap_s or 0.0
    rows.sort(key=lambda row: row[0])
    inferred = opened(written(tmp_path / "requests.jsonl", *(row for _, row in rows))).jobs
    want = {tuple(turn.input_tokens for turn in job.turns) for job in recorded}
    have = {tuple(turn.input_tokens for turn in job.turns) for job in inferred}
    assert len(want - have) < 0.01 * len(want)


def test_a_session_id_says_which_rows_belong_together(tmp_path: Path) -> None:
    """As in aiperf, a row of a session adds to it and its delay starts at the answer; rows that repeat
    earlier blocks are whole prompts."""
    path = written(
        tmp_path / "sessions.jsonl",
        {"session_id": "s", "timestamp": 0, "input_length": 700, "output_length": 40},
        {"session_id": "w", "timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
        {
            "session_id": "s",
            "delay": 1500,
            "input_length": 100,
            "output_length": 60,
            "extra": {"job_id": "s"},
        },
        {"session_id": "w", "delay": 250, "input_length": 1030, "output_length": 9, "hash_ids": [1, 3, 4]},
    )
    adding, whole = opened(path).jobs
    assert counts(adding.turns) == [(700, 0, 40), (840, 740, 60)]
    assert (adding.turns[0].gap_s, adding.turns[0].gap_measured) == (1.5, True)
    assert counts(whole.turns) == [(600, 0, 9), (1030, 512, 9)]
    assert whole.turns[1].block_runs == ((1, 1), (3, 1))


# ---- aiperf, vLLM, ShareGPT ----


def test_aiperf_sessions_keep_their_texts_and_delays(tmp_path: Path) -> None:
    """Questions and delays are as written; an answer's length is the requested one, else an assumption."""
    first = {"text": "x" * 40, "timestamp": 2000, "output_length": 30}
    session = {"session_id": "s", "turns": [first, {"texts": ["y", "z"], "delay": 750}]}
    workload = opened(written(tmp_path / "sessions.jsonl", session))
    (job,) = workload.jobs
    assert counts(job.turns) == [(10, 0, 30), (41, 40, ASSUMED_OUTPUT_TOKENS)]
    assert (job.turns[0].gap_s, job.turns[0].gap_measured, job.arrival_s) == (0.75, True, 2.0)
    assert [turn.input_text for turn in job.turns] == ["x" * 40, "y\nz"]
    assert not job.has_text
    assert not job.tokens_measured
    assert workload.notes == ["1 answers have no recorded length: ASSUMED 256 tokens"]


def test_a_chat_for_vllms_benchmark_keeps_who_said_what(tmp_path: Path) -> None:
    """System text, questions and answers are read; a last question without an answer is not."""
    said = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")
    chat = {"id": 7, "messages": [{"role": role, "content": content} for role, content in said]}
    path = written(tmp_path / "chats.json", [chat, {"id": "empty", "messages": []}])
    workload = opened(path)
    (job,) = workload.jobs
    assert (job.job_id, job.system_text) == ("7", "Be brief.")
    assert [(turn.input_text, turn.output_text) for turn in job.turns] == [("Hi", "Hello.")]
    assert job.has_text
    assert workload.notes == ["1 conversations without a question and an answer were left out"]


def _agents_chat() -> dict[str, object]:
    """A chat as agents record it: calls instead of a text, texts in parts, no id."""
    status = {"name": "bash", "arguments": '{"command": "git status"}'}
    read = {"name": "read_file", "arguments": {"path": "a.py"}}
    return {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look"},
                    {"type": "image_url", "image_url": {"url": "u"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c0", "type": "function", "function": status},
                    {"id": "c1", "type": "function", "function": read},
                ],
            },
            {"role": "tool", "tool_call_id": "c0", "content": "clean"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "pass"}]},
            {"role": "assistant", "content": "Done."},
        ]
    }


def test_a_chat_of_an_agent_keeps_its_calls(tmp_path: Path) -> None:
    """Calls become the turn's calls, and text that the model wrote; pictures are skipped."""
    (job,) = opened(written(tmp_path / "chats.json", [_agents_chat()])).jobs
    assert (job.job_id, job.system_text) == ("chat-0", "Be brief.")
    calling, last = job.turns
    assert (calling.input_text, calling.gap_kind) == ("Look", GapKind.TOOL)
    assert calling.calls == (ToolRun("bash", "git status"), ToolRun("read_file"))
    assert calling.output_text == 'bash {"command": "git status"}\nread_file {"path": "a.py"}'
    assert (last.input_text, last.output_text, last.calls) == ("clean\n\npass", "Done.", ())


@pytest.mark.parametrize(
    "records",
    [
        [_agents_chat(), {"id": "b", "messages": [{"role": "user", "content": "?"}] * 2}],
        [{"id": n, "messages": [{"role": r, "content": "x"} for r in ("user", "assistant")]} for n in (1, 2)],
        [{"id": n, "conversations": [{"from": f, "value": "x"} for f in ("human", "gpt")]} for n in "ab"],
        [{"session_id": n, "turns": [{"text": "x"}]} for n in "ab"],
        [_request(0, 100, [], session_id=name) for name in "ab"],
        [
            {
                "job_id": n,
                "source": "s",
                "turns": [{"input_tokens": 9, "prefix_tokens": 0, "output_tokens": 1, "gap_kind": "end"}],
            }
            for n in "ab"
        ],
    ],
    ids=["agent", "openai", "sharegpt", "aiperf", "mooncake", "recorded"],
)
def test_records_stand_one_a_line_or_in_one_list(
    tmp_path: Path, records: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both give the same jobs; ``continuum workload`` reads both."""
    lines, one = written(tmp_path / "lines", *records), written(tmp_path / "list", records)
    both = [[(job.job_id, job.turns) for job in opened(path).jobs] for path in (lines, one)]
    assert both[0] == both[1] != []
    assert main(["workload", str(lines)]) == main(["workload", str(one)]) == 0


def test_a_sharegpt_conversation_starts_with_its_first_question(tmp_path: Path) -> None:
    """A part of a longer conversation may begin with an answer, which cannot be replayed."""
    said = ("gpt", "...as I said."), ("human", "Why?"), ("gpt", "So."), ("human", "And?"), ("gpt", "Yes.")
    chat = {"id": "a_0", "conversations": [{"from": speaker, "value": value} for speaker, value in said]}
    (job,) = opened(written(tmp_path / "sharegpt.json", json.dumps([chat], indent=1))).jobs
    assert [turn.input_text for turn in job.turns] == ["Why?", "And?"]
    assert counts(job.turns) == [(1, 0, 1), (3, 2, 1)]
    assert job.turns[0].gap_kind is GapKind.USER


# ---- our own ----


def _header() -> TraceHeader:
    return TraceHeader(wall_time_s=0.0, monotonic_s=0.0, policy="continuum", block_size=16)


def _event(now: float, kind: str, job_id: str, turn: int, **fields: Any) -> JobEvent:
    return JobEvent(now=now, kind=kind, job_id=job_id, req_id=f"{job_id}{turn}", turn=turn, **fields)


def _traced(path: Path) -> Path:
    """Two jobs: one of two turns with a tool between them and an aborted third, one of one turn."""
    writer = TraceWriter.open(str(path))
    writer.emit(_header())
    writer.emit(_event(10.0, "turn_arrived", "a", 1, num_prompt_tokens=100))
    writer.emit(_event(10.5, "turn_arrived", "b", 1, num_prompt_tokens=50))
    writer.emit(_event(12.0, "turn_ended", "a", 1, num_prompt_tokens=100, num_output_tokens=20))
    writer.emit(PinEvent(now=12.0, kind="created", job_id="a", req_id="a1", num_blocks=7))
    writer.emit(_event(12.1, "tools_started", "a", 1, tools=["bash/git/status"]))
    writer.emit(_event(13.0, "turn_ended", "b", 1, num_prompt_tokens=50, num_output_tokens=5))
    writer.emit(_event(14.5, "turn_arrived", "a", 2, num_prompt_tokens=150, num_known_tokens=112))
    writer.emit(
        _event(15.0, "turn_ended", "a", 2, num_prompt_tokens=150, num_output_tokens=9, num_known_tokens=112)
    )
    writer.emit(_event(16.0, "turn_arrived", "a", 3, num_prompt_tokens=170, num_known_tokens=144))
    writer.emit(_event(16.1, "turn_aborted", "a", 3, num_prompt_tokens=170))
    writer.close()
    return path


def test_a_scheduler_trace_gives_back_the_jobs_it_served(tmp_path: Path) -> None:
    """Tokens, arrivals and gaps are those that the engine saw, and count as measured."""
    workload = opened(_traced(tmp_path / "trace.jsonl"))
    first, second = workload.jobs
    assert counts(first.turns) == [(100, 0, 20), (150, 112, 9)]
    assert (first.turns[0].gap_kind, first.turns[0].gap_s, first.turns[0].gap_measured) == ("tool", 2.5, True)
    assert first.turns[0].calls == (ToolRun("bash", "git status", 2.5),)
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
    assert workload.notes == ["1 turns were left out: they were not answered to the end"]


def test_a_cut_trace_is_read_up_to_the_cut_and_says_so(tmp_path: Path) -> None:
    """Everything before the half line of a killed server is read; a half line elsewhere is an error."""
    path = _traced(tmp_path / "trace.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:8]) + lines[8][:30])
    workload = opened(path)
    assert [len(job.turns) for job in workload.jobs] == [1, 1]
    assert workload.notes[0] == "the trace was CUT OFF in line 9 and read up to there"
    path.write_bytes(b"".join(lines[:4]) + lines[4][:30] + b"\n" + b"".join(lines[5:]))
    with pytest.raises(WorkloadError, match="line 5: not a trace event"):
        opened(path)


@pytest.mark.parametrize("policy", ["fcfs", "gate:0.5", "continuum"])
def test_a_trace_of_any_policy_is_a_workload(tmp_path: Path, policy: str) -> None:
    """Job ids, tokens, shared prefixes and gaps of any policy's trace are read."""
    path, ran = tmp_path / "trace.jsonl.zst", tmp_path / "jobs.jsonl"
    jobs = ["--workload", "swe-bench:turns=0.3,tokens=0.1", "--jobs", "5"]
    made = open_workload(jobs[1]).sample(5, 0).jobs
    simulate = ["simulate", *jobs, "--rate", "1", "--policies", policy, "--trace", str(path)]
    assert main(simulate) == 0
    assert main(["workload", str(path), "--out", str(ran)]) == 0
    read = {job.job_id: job for job in opened(ran).jobs}
    assert read.keys() == {job.job_id for job in made}
    for job in made:
        for turn, again in zip(job.turns, read[job.job_id].turns, strict=True):
            assert (again.input_tokens, again.output_tokens) == (turn.input_tokens, turn.sampled_tokens)
            assert turn.prefix_tokens - 16 <= again.prefix_tokens <= turn.prefix_tokens
            assert again.gap_s == (None if turn.gap_s is None else pytest.approx(turn.gap_s, abs=0.05))
    assert main(["simulate", "--workload", str(path), "--policies", "fcfs"]) == 0


def test_calls_that_a_server_was_told_of_are_in_its_trace(tmp_path: Path) -> None:
    """Under every policy a signal has the calls as the model wrote them."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter.open(str(path))
    writer.emit(msgspec.structs.replace(_header(), policy="fcfs"))
    for turn in (1, 2):
        req_id = f"a{turn}"
        writer.emit(
            RequestArrived(
                now=3.0 * turn,
                req_id=req_id,
                arrival_s=3.0 * turn,
                num_prompt_tokens=9,
                max_tokens=9,
                job_id="a",
            )
        )
        writer.emit(RequestsEnded(now=3.0 * turn + 1, req_ids=[req_id], how="stopped"))
        call = ReportedToolCall(name="bash", arguments='{"command": "git status"}')
        writer.emit(SignalEvent(now=3.0 * turn + 1, kind="tool_gap_started", req_id=req_id, calls=[call]))
    writer.close()
    (job,) = opened(path).jobs
    assert (job.turns[0].gap_kind, job.turns[0].gap_s) == (GapKind.TOOL, 2.0)
    assert [turn.calls for turn in job.turns] == [(ToolRun("bash", "git status", 2.0),), ()]


def test_a_trace_without_jobs_says_how_to_get_one_with(tmp_path: Path) -> None:
    """Without job ids only the continuum policy infers jobs."""
    writer = TraceWriter.open(str(tmp_path / "trace.jsonl"))
    writer.emit(_header())
    writer.close()
    with pytest.raises(WorkloadError, match="names no jobs: its requests came without job ids"):
        opened(tmp_path / "trace.jsonl")


def _record(job_id: str, turn: int, start_s: float, **fields: Any) -> TurnRecord:
    defaults: dict[str, Any] = {"latency_s": 1.0, "prompt_tokens": 100 * turn, "output_tokens": 30}
    return TurnRecord(job_id=job_id, turn=turn, start_s=start_s, **(defaults | fields))


def test_records_of_a_run_can_be_run_again(tmp_path: Path) -> None:
    """Jobs, sub-agents and waits are as sent; a job ends before a failed turn."""
    records = [
        RunHeader(),
        _record("a", 1, 5.0, tool="bash", command="ls", gap_s=2.0),
        _record("a.sub", 1, 6.0),
        _record("b", 1, 7.0, error="refused"),
        _record("a", 2, 9.0, gap_s=1.0),
        _record("a", 3, 11.0, error="timed out"),
        JobRecord(job_id="a", start_s=5.0, end_s=12, num_turns=2, num_planned_turns=3, num_recorded_turns=3),
        JobRecord(
            job_id="a.sub",
            start_s=6.0,
            end_s=7.0,
            num_turns=1,
            num_planned_turns=1,
            num_recorded_turns=1,
            parent_job="a",
        ),
    ]
    workload = opened(
        written(tmp_path / "records.jsonl", *(msgspec.json.encode(record).decode() for record in records))
    )
    parent, child = workload.jobs
    assert counts(parent.turns) == [(100, 0, 30), (200, 130, 30)]
    assert (parent.turns[0].gap_s, parent.turns[0].gap_measured, parent.turns[0].spawns) == (
        2,
        False,
        ("a.sub",),
    )
    assert (child.parent_job, child.arrival_s) == ("a", 1.0)
    assert "1 jobs were left out: their first turn failed" in workload.notes


# ---- what is none of these ----

_COUNTS = {"input_tokens": 9, "prefix_tokens": 0, "output_tokens": 1}
BAD = [
    ("x.jsonl", ['{"color": 1}'], "line 1: of no known format: a record of color"),
    ("x.jsonl", ["not json at all"], "line 1: neither JSON lines nor a JSON list"),
    ("x.json", ['[{"id": "a", "text": "b"}]'], "line 1: of no known format: a record of id, text"),
    ("x.json", ['[{"id": "a", "messages": []}', "line 2"], "line 1: neither JSON lines nor a JSON list"),
    ("x.json", ["[]"], "holds no jobs"),
    ("x.json", ["[" * 100_000], "line 1: neither JSON lines nor a JSON list: maximum recursion depth"),
    ("x.jsonl", ['{"job_id": ' + "[" * 100_000], "line 1: neither JSON lines nor a JSON list"),
    ("x.json", ['[{"id": "a", "messages": ' + "[" * 100_000], "line 1: neither JSON lines nor a JSON list"),
    (
        "m.jsonl",
        [_request(0, 100, []), '{"input_length": 1, "extra": ' + "[" * 100_000],
        "line 2: not a Mooncake request: maximum recursion depth",
    ),
    (
        "x.json",
        [[{"id": "a", "messages": [{"role": "user", "content": 5}]}]],
        "entry 1: not a conversation: message 1, field content: Expected `str | array | null`, got `int`",
    ),
    (
        "x.json",
        [[{"id": "a", "messages": [{"role": "referee", "content": "!"}]}]],
        "entry 1: message 1: unknown speaker 'referee'",
    ),
    (
        "x.json",
        [
            [{"id": "a", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]}]
            * 2
        ],
        "entry 2: job a is already in entry 1",
    ),
    ("m.jsonl", [_request(0, 0, [])], "line 1: .*field input_length: Expected `int` >= 1"),
    ("m.jsonl", [_request(0, 100, [1, 2])], "line 1: hash_ids name 2 blocks of 512, but input_length is 100"),
    (
        "m.jsonl",
        [_request(9, 100, [], session_id="s"), _request(5, 200, [], session_id="s")],
        r"line 2: timestamp is 5, earlier than that of the request before \(9\)",
    ),
    ("a.jsonl", [{"turns": [{"delay": 3}]}], "line 1: turn 1 has neither text nor texts"),
    (
        "r.jsonl",
        [{"source": "x", "turns": [{**_COUNTS, "gap_kind": "end"}]}],
        "line 1: not a recorded job: Object missing required field `job_id`",
    ),
    (
        "t.json",
        [[{"type": "header", "schema_version": 3}]],
        "a JSON list of the events of a trace, but each must be on its own line",
    ),
    ("a.jsonl", [{"turns": []}], "line 1: job session-0: it has no turns"),
    ("a.jsonl", [{"turns": [{"text": "a"}, {"text": "b", "delay": -3}]}], "line 1: .*turn 2, field delay"),
]


@pytest.mark.parametrize(("name", "lines", "complaint"), BAD, ids=range(len(BAD)))
def test_a_file_that_is_wrong_is_refused_in_one_sentence(
    name: str, lines: list[object], complaint: str, tmp_path: Path
) -> None:
    """For every format the error names file, line or entry, and the fault."""
    path = written(tmp_path / name, *lines)
    with pytest.raises(WorkloadError, match=complaint) as caught:
        open_workload(str(path))
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_turn_missing_from_records_is_named(tmp_path: Path) -> None:
    """Records that skip from turn 1 to turn 3 cannot be run again."""
    lines = (msgspec.json.encode(_record("a", turn, float(turn))).decode() for turn in (1, 3))
    with pytest.raises(WorkloadError, match="job a has turn 3 where turn 2 is missing"):
        open_workload(str(written(tmp_path / "records.jsonl", *lines)))


def test_a_file_of_another_system_is_read(tmp_path: Path) -> None:
    """A byte order mark and Windows line ends are accepted."""
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(_two_jobs()) + b"\r\n")
    assert [job.job_id for job in opened(path).jobs] == ["a", "b"]


def _two_jobs() -> list[bytes]:
    return [json.dumps(_request(0, 100, [], session_id=name)).encode() for name in "ab"]


@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gzip"), (zstd.compress, "zstd")])
def test_a_packed_file_is_unpacked(tmp_path: Path, pack: Callable[[bytes], bytes], name: str) -> None:
    """Compression is recognized by content; a truncated or damaged file is reported."""
    path = tmp_path / "jobs.jsonl"
    packed = pack(b"\n".join(_two_jobs()))
    path.write_bytes(packed)
    assert [job.job_id for job in opened(path).jobs] == ["a", "b"]
    path.write_bytes(packed[:-4])
    said = rf"jobs\.jsonl is cut off: its last {name} frame is not whole\.$"
    with pytest.raises(WorkloadError, match=said):
        open_workload(str(path))
    path.write_bytes(packed[:12] + b"nonsense" + packed[20:])
    with pytest.raises(WorkloadError, match=rf"jobs\.jsonl is not a valid {name} file"):
        open_workload(str(path))


def test_other_packers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(lzma.compress(b"\n".join(_two_jobs())))
    with pytest.raises(WorkloadError, match=r"jobs\.jsonl is packed by xz: unpack it first\.$"):
        open_workload(str(path))


@pytest.mark.parametrize("num_lost", [0, 30])
def test_a_compressed_trace_is_read_as_far_as_it_goes(tmp_path: Path, num_lost: int) -> None:
    """A trace is compressed as the engine writes it; the truncated end of a killed engine is no error."""
    path = _traced(tmp_path / "trace.jsonl.zst")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - num_lost])
    workload = opened(path)
    assert [job.job_id for job in workload.jobs] == ["a", "b"][: len(workload.jobs)]
    assert bool(num_lost) == any("CUT OFF" in note for note in workload.notes)
