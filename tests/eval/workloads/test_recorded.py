"""Files of recorded jobs are read completely and unchanged, or refused with the wrong line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from continuum.cli.main import main
from eval.errors import WorkloadError
from eval.workloads.catalog import open_workload
from eval.workloads.job import Job, ToolRun
from eval.workloads.recorded import read_recorded, write_jobs
from tests.eval.workloads.jobs import SHARED, some_jobs, written

shared = pytest.mark.shared
needs_shared = pytest.mark.skipif(
    not SHARED.exists(), reason="the recorded workloads are not beside the repository"
)


def _job(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"job_id": "a", "source": "by hand", "turns": list(turns)} | fields


def _turn(
    input_tokens: int, prefix_tokens: int = 0, output_tokens: int = 10, **fields: Any
) -> dict[str, Any]:
    counts = {"input_tokens": input_tokens, "prefix_tokens": prefix_tokens, "output_tokens": output_tokens}
    return {**counts, "gap_kind": "end", **fields}


GOOD = _job(_turn(100, gap_kind="tool", tool="bash", tool_s=1.5), _turn(150, 110))


@pytest.mark.slow
@shared
@needs_shared
@pytest.mark.parametrize(
    ("name", "num_roots", "num_children", "num_turns", "measured", "assumed"),
    [
        ("agentcgroup-claude", 47, 7, 1537, 1483, 0),
        ("agentcgroup-glm", 85, 1, 4233, 4147, 0),
        ("azure-code-arrivals", 6277, 0, 6277, 0, 0),
        # 43 of 45 sub-agents: two began after the last turn of their parent's recording.
        ("kv-cache-tester", 473, 43, 32227, 31647, 0),
        ("miniswe-gemini3-text", 37, 0, 1504, 0, 1465),
        ("mooncake-conversation", 5739, 0, 8442, 0, 2703),
    ],
)
def test_every_recording_is_read_whole(
    name: str, num_roots: int, num_children: int, num_turns: int, measured: int, assumed: int
) -> None:
    """All jobs, turns and gaps are read in a few seconds, each gap marked as measured or assumed."""
    started = time.perf_counter()
    jobs, _ = read_recorded(SHARED / f"{name}.jsonl")
    assert time.perf_counter() - started < 10
    turns = [turn for job in jobs for turn in job.turns]
    children = [job for job in jobs if job.parent_job is not None]
    assert (len(jobs) - len(children), len(children), len(turns)) == (num_roots, num_children, num_turns)
    waits = [turn for turn in turns if turn.gap_s is not None]
    assert sum(turn.gap_measured for turn in waits) == measured
    assert len(waits) - measured == assumed
    assert sum(len(turn.spawns) for turn in turns) == num_children


@shared
@needs_shared
def test_a_parent_waits_for_its_sub_agent_instead_of_for_its_recorded_call() -> None:
    """The turn that called Task names the sub-agent; its gap is that of the other calls."""
    jobs, _ = read_recorded(SHARED / "agentcgroup-claude.jsonl")
    waiting = [turn for job in jobs for turn in job.turns if turn.spawns]
    assert len(waiting) == 7
    for turn in waiting:
        assert [call.tool for call in turn.calls] == ["Task"]
        assert turn.calls[0].seconds is not None
        assert turn.calls[0].seconds > 60
        assert turn.gap_s == 0


@pytest.mark.slow
@shared
@needs_shared
def test_hashes_of_a_recording_mean_the_same_where_it_says_so() -> None:
    """A family shares block ids, Mooncake's hold for all jobs, and no id names a partial block."""
    agents, _ = read_recorded(SHARED / "kv-cache-tester.jsonl")
    by_id = {job.job_id: job for job in agents}
    assert by_id["trace_0003/sub00"].block_scope == by_id["trace_0003"].block_scope == "trace_0003"
    chats, _ = read_recorded(SHARED / "mooncake-conversation.jsonl")
    assert {job.block_scope for job in chats} == {"mooncake-conversation"}
    for job in (*agents, *chats):
        for turn in job.turns:
            assert sum(count for _, count in turn.block_runs) == turn.input_tokens // job.block_size


@pytest.mark.slow
@shared
@needs_shared
@pytest.mark.parametrize("name", ["agentcgroup-claude", "kv-cache-tester", "mooncake-conversation"])
def test_a_recording_survives_being_written_again(name: str, tmp_path: Path) -> None:
    """A file read, written and read again is equal, including sub-agents."""
    jobs, _ = read_recorded(SHARED / f"{name}.jsonl")
    write_jobs(tmp_path / "again.jsonl", jobs)
    assert read_recorded(tmp_path / "again.jsonl") == (jobs, [])


@given(jobs=some_jobs())
def test_any_jobs_survive_being_written(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any job is read back equal from a file."""
    path = tmp_path_factory.mktemp("written") / "jobs.jsonl"
    write_jobs(path, jobs)
    assert read_recorded(path) == (jobs, [])


def test_each_gap_is_what_its_kind_says(tmp_path: Path) -> None:
    """A measured time takes precedence over an assumed one; a time between requests counts as assumed."""
    turns = (
        _turn(10, gap_kind="tool", tool="bash", cmd="ls", tool_s=0.5, tool_s_est=9),
        _turn(20, gap_kind="tool", tool="bash", cmd="ls", tool_s_est=0.25),
        _turn(30, gap_kind="user", other_gap_s=60.0),
        _turn(40, gap_kind="user", gap_to_next_request_s=30.0),
        _turn(50, gap_kind="unknown"),
        _turn(60, gap_kind="end", tool="echo", tool_s=3.0),
    )
    ((job,), _) = read_recorded(written(tmp_path / "jobs.jsonl", _job(*turns)))
    assert [(turn.gap_s, turn.gap_measured) for turn in job.turns] == [
        (0.5, True),
        (0.25, False),
        (60.0, True),
        (30.0, False),
        (None, False),
        (None, False),
    ]
    assert job.turns[0].calls == (ToolRun("bash", "ls", 0.5),)
    assert job.turns[-1].calls == ()


def test_parallel_calls_stand_side_by_side(tmp_path: Path) -> None:
    """Each call keeps its own seconds; the gap is the turn's wait."""
    calls = [{"tool": "Read", "s": 0.03}, {"tool": "Bash", "s": 2.0, "cmd": "ls"}]
    line = _job(_turn(10, gap_kind="tool", tool="Read", tool_s=2.1, calls=calls), _turn(30))
    ((job,), _) = read_recorded(written(tmp_path / "jobs.jsonl", line))
    assert job.turns[0].calls == (ToolRun("Read", None, 0.03), ToolRun("Bash", "ls", 2.0))
    assert job.turns[0].gap_s == 2.1


def test_two_sub_agents_begin_where_the_recording_places_them(tmp_path: Path) -> None:
    """If only the gap was timed, the sub-agents' share is removed and the rest stays."""
    parent = _job(
        _turn(10, gap_kind="tool", tool_s=1.0, llm_s=2.0, t=0.0),
        _turn(30, gap_kind="tool", tool="unnamed", tool_s=20.0, llm_s=3.0, t=3.0),
        _turn(50, t=26.0),
    )
    children = (
        _job(_turn(5), job_id="b", parent_job="a", start_in_parent_s=16.2, duration_s=10.0),
        _job(_turn(5), job_id="c", parent_job="a", start_in_parent_s=21.2, duration_s=15.0),
        _job(_turn(5), job_id="d", parent_job="gone", start_in_parent_s=1.0),
    )
    jobs, notes = read_recorded(written(tmp_path / "jobs.jsonl", *children, parent))
    by_id = {job.job_id: job for job in jobs}
    assert by_id["a"].turns[1].spawns == ("b", "c")
    assert by_id["a"].turns[1].gap_s == 5.0
    assert by_id["d"].parent_job is None
    assert notes == ["1 sub-agents became separate jobs: no turn here starts them"]


def test_an_unreplayed_sub_agents_call_is_still_waited_for(tmp_path: Path) -> None:
    """Of two Task calls, the one whose sub-agent is not in the file keeps its seconds."""
    calls = [{"tool": "Task", "s": 30.0}, {"tool": "Task", "s": 8.0}]
    parent = _job(_turn(10, gap_kind="tool", tool="Task", tool_s=30.0, calls=calls), _turn(30))
    child = _job(_turn(5), job_id="b", parent_job="a", start_in_parent_s=0.1)
    jobs, _ = read_recorded(written(tmp_path / "jobs.jsonl", parent, child))
    assert (jobs[0].turns[0].gap_s, jobs[0].turns[0].spawns) == (8.0, ("b",))


BAD_LINES = [
    ("{not json", "line 2: not a recorded job: JSON is malformed"),
    (
        '{"job_id": "b", "source": "x", "turns": [{"input',
        "line 2: not a recorded job: Input data was truncated",
    ),
    ({"job_id": "b"}, "line 2: not a recorded job: Object missing required field `source`"),
    (
        _job(_turn(9) | {"input_tokens": "9"}),
        "line 2: .*turn 1, field input_tokens: Expected `int`, got `str`",
    ),
    (_job(_turn(9), color="red"), "line 2: .*unknown field `color`"),
    (_job(_turn(9, tool_ms=3)), "line 2: .*turn 1: Object contains unknown field `tool_ms`"),
    (
        _job(_turn(9, gap_kind="tool", tool_s=-1.0), _turn(30), job_id="b"),
        "line 2: .*turn 1, field tool_s: Expected `float` >= 0.0",
    ),
    (
        _job(_turn(9, gap_kind="tool", calls=[{"tool": "x", "s": -0.1}]), _turn(30), job_id="b"),
        "line 2: .*turn 1, call 1, field s: Expected `float` >= 0.0",
    ),
    (
        _job(_turn(9, gap_kind="lunch"), _turn(30)),
        "line 2: .*turn 1, field gap_kind: Invalid enum value 'lunch'",
    ),
    (_job(job_id="b"), "line 2: job b: it has no turns"),
    (_job(_turn(9)), "line 2: job a is already on line 1"),
    (_job(_turn(0), job_id="b"), "line 2: job b: turn 1: input_tokens is 0, but must be at least 1"),
    (
        _job(_turn(9, gap_kind="tool"), _turn(9, 10), job_id="b"),
        r"line 2: job b: turn 2: prefix_tokens is 10, more than input_tokens \(9\)",
    ),
    (
        _job(_turn(9, gap_kind="tool"), _turn(50, 20), job_id="b"),
        "line 2: job b: turn 2: prefix_tokens is 20, but the turn before ends at 19",
    ),
    (_job(_turn(9, 1), job_id="b"), "line 2: job b: turn 1: prefix_tokens is 1, which nothing precedes"),
    (
        _job(_turn(9, new_input_tokens=8), job_id="b"),
        "line 2: job b: turn 1: new_input_tokens is 8, but input_tokens less prefix_tokens is 9",
    ),
    (_job(_turn(9), _turn(30), job_id="b"), "line 2: job b: turn 1: gap_kind is end, but only the last turn"),
    (
        _job(_turn(9, gap_kind="user"), job_id="b"),
        "line 2: job b: turn 1: gap_kind is user, but the last turn",
    ),
    (
        _job(_turn(100, hash_runs=[[0, 9]]), job_id="b", block_size=16),
        "line 2: job b: turn 1: hash_runs name 9 full blocks of 16, but input_tokens is 100",
    ),
    (
        _job(_turn(100, hash_runs=[[0, 9]]), job_id="b"),
        "line 2: job b: turn 1: .*but the job has no block_size",
    ),
    (
        _job(_turn(10**12), job_id="b"),
        "line 2: job b: turn 1: input_tokens is 1000000000000, but must be at most 1000000000",
    ),
    (
        _job(_turn(100, hash_runs=[[2**63, 1]]), job_id="b", block_size=16),
        "line 2: job b: turn 1: hash_runs hold an id of more than 4294967295",
    ),
    (_job(_turn(9), job_id="b", shared_prefix_tokens=10), "line 2: job b: shared_prefix_tokens is 10"),
    (_job(_turn(9), job_id="b", arrival_s=-1), "line 2: .*field arrival_s: Expected `float` >= 0.0"),
    (_job(_turn(9), job_id="b", parent_job="a"), "line 2: job b: no turn of its parent a starts it"),
    (
        _job(_turn(9, gap_kind="tool", spawns=["c"]), _turn(20), job_id="b"),
        "line 2: job b: turn 1: spawns names c, which is no sub-agent of it",
    ),
    (_job(_turn(9, spawns=["a"]), job_id="b"), "line 2: job b: turn 1: it is the last turn, but has spawns"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_and_stops(
    line: object, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence has the line, the place in it and the limit; the exit code is 1."""
    path = written(tmp_path / "jobs.jsonl", GOOD, line, GOOD | {"job_id": "later"})
    with pytest.raises(WorkloadError, match=complaint):
        open_workload(str(path))
    assert main(["workload", str(path)]) == 1
    out, told = capsys.readouterr()
    assert out == ""
    assert told.startswith(f"continuum: {path}, line 2: ")
    assert told.count("\n") == 1


def test_a_circle_of_parents_is_refused(tmp_path: Path) -> None:
    """Two jobs that start each other would never begin."""
    first = _job(_turn(9, gap_kind="tool", spawns=["b"]), _turn(20), job_id="a", parent_job="b")
    second = _job(_turn(9, gap_kind="tool", spawns=["a"]), _turn(20), job_id="b", parent_job="a")
    with pytest.raises(WorkloadError, match="line 1: job a: its chain of parents is a cycle"):
        read_recorded(written(tmp_path / "jobs.jsonl", first, second))
