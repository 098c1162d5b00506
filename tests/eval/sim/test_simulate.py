"""``continuum simulate`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuum.cli.main import main
from continuum.learning.tool_stats import ToolStats
from continuum.tuning import Tuning
from engine.records.messages import ToolCall
from eval.load.records import told
from eval.report.metrics import RunResult
from eval.report.results import read_results
from eval.sim.replicas.router import ROUTERS
from eval.trace.analysis.pinned_tokens import pinned_tokens
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.recorded import write_jobs
from tracing.events import JobEvent, PinEvent, StepDecision, TraceEnd, TraceHeader
from tracing.reader import TraceReport, read_trace

ON_HARDWARE = ["--model", "llama-3.1-8b", "--gpu", "h100"]


def _job(number: int, num_turns: int = 6) -> Job:
    """A job that grows by 2,000 tokens a turn and waits 3 s for its tool."""
    turns = []
    for index in range(num_turns):
        context = 8000 + 2000 * index
        turns.append(
            Turn(
                input_tokens=context,
                prefix_tokens=context - 1900 if index else 0,
                output_tokens=100,
                gap_kind=GapKind.END if index + 1 == num_turns else GapKind.TOOL,
                gap_s=None if index + 1 == num_turns else 3.0,
                gap_measured=index + 1 < num_turns,
                calls=() if index + 1 == num_turns else (ToolRun("Bash", "pytest", 3.0),),
            )
        )
    return Job(job_id=f"job {number}", source="by hand", turns=tuple(turns))


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "jobs.jsonl"
    write_jobs(path, [_job(number) for number in range(12)])
    return path


def _simulate(workload: Path, out: Path, *flags: str) -> list[RunResult]:
    """Returns the results of a successful run."""
    arguments = ["simulate", "--workload", str(workload), *ON_HARDWARE, "--json", str(out), *flags]
    assert main(arguments) == 0
    return read_results(out).runs


@pytest.mark.slow
def test_a_grid_has_a_run_for_each_policy_load_and_seed(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are ordered by load, seed, policy; all jobs end, and the printed table names what was assumed."""
    flags = ["--policies", "fcfs,continuum", "--rate", "0.5,2", "--seeds", "2", "--kv-tokens", "60000"]
    runs = _simulate(workload, tmp_path / "a.json", *flags)
    cells = [(run.setting.jobs_per_s, run.setting.seed, run.name) for run in runs]
    assert cells == [(r, s, p) for r in (0.5, 2.0) for s in (0, 1) for p in ("fcfs", "continuum")]
    assert {run.num_completed_jobs for run in runs} == {12}
    assert {run.kv_usage_at_end for run in runs} == {0.0}
    assert all(run.setting.simulated and run.setting.hardware for run in runs)
    # As in bench, the same file is the same workload from any folder.
    assert {run.setting.workload for run in runs} == {"jobs.jsonl"}
    table = capsys.readouterr().out
    for wanted in ("continuum", "0.5 jobs/s", "60 measured", "COMPUTED", "ASSUMED, Poisson"):
        assert wanted in table


@pytest.mark.slow
def test_runs_begin_with_what_a_server_had_learned_and_keep_it_as_it_was(
    workload: Path, tmp_path: Path
) -> None:
    """Every run starts from the same state in any order and process; the server's file is not changed."""
    state = tmp_path / "state.json"
    server = ToolStats(Tuning(), str(state))
    for now in range(20):
        server.observe(server.keys([ToolCall("Bash", "pytest")]), 500.0, now=float(now))
    server.save()
    learned = state.read_bytes()
    policies = f"continuum,continuum:estimator_state={state},known-work:estimator_state={state}"
    flags = ["--policies", policies, "--rate", "1", "--seeds", "2", "--kv-tokens", "60000"]
    files = [tmp_path / name for name in ("one.json", "two.json", "again.json")]
    for file, processes in zip(files, ("1", "2", "1"), strict=True):
        runs = _simulate(workload, file, *flags, "--processes", processes)
    assert len({file.read_bytes() for file in files}) == 1
    assert state.read_bytes() == learned
    without, with_it = runs[:2]
    assert with_it.pins_ended != without.pins_ended  # No pin waits for a call that is known to take 500 s.

    trace, one = tmp_path / "trace.jsonl", f"continuum:estimator_state={state}"
    _simulate(workload, files[0], "--policies", one, "--trace", str(trace))
    header = next(read_trace(trace))
    assert isinstance(header, TraceHeader)
    assert header.estimator_state is not None
    assert "pytest" in header.estimator_state


def test_an_estimator_state_that_is_none_is_one_sentence(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid or missing state file is refused: a simulation creates none."""
    (tmp_path / "bad").write_text("{}")
    for name, wanted in (
        ("missing", "estimator_state: no such file"),
        ("bad", "cannot be used: it is damaged"),
    ):
        policy = f"continuum:estimator_state={tmp_path / name}"
        assert main(["simulate", "--workload", str(workload), "--policies", policy]) == 2
        assert wanted in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()


@pytest.mark.slow
def test_turns_that_are_pinned_are_told_by_their_receipts(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a server's client counts them, at least as many turns are pinned as returned to a pin. The count is
    None without receipts, or if none reports a pin."""
    flags = ["--policies", "continuum,fixed-ttl,fcfs", "--rate", "1", "--kv-tokens", "60000"]
    ours, silent, fcfs = _simulate(workload, tmp_path / "a.json", *flags)
    assert ours.num_pinned_turns is not None
    assert 0 < ours.pins_ended["handed_over"] <= ours.num_pinned_turns <= ours.num_turns
    assert sum(silent.pins_ended.values()) > 0
    assert (silent.num_pinned_turns, fcfs.num_pinned_turns) == (None, None)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("turns pinned")]
    assert row.split()[3:] == [str(ours.num_pinned_turns), *"----"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(workload: Path, tmp_path: Path) -> None:
    """The result does not depend on the number of processes; another seed gives another run."""
    flags = ["--policies", "fcfs,continuum,oracle", "--rate", "1", "--seeds", "2", "--kv-tokens", "60000"]
    files = [tmp_path / name for name in ("one.json", "two.json", "other.json")]
    _simulate(workload, files[0], *flags, "--processes", "1")
    _simulate(workload, files[1], *flags, "--processes", "2")
    _simulate(workload, files[2], *flags, "--first-seed", "7")
    one, two, other = (path.read_bytes() for path in files)
    assert one == two
    assert one != other


@pytest.mark.slow
def test_holding_pays_where_memory_is_short_and_costs_nothing_where_it_is_not(
    workload: Path, tmp_path: Path
) -> None:
    """Twelve jobs of 18,100 tokens: with memory for three, continuum recomputes less than fcfs."""
    flags = ["--policies", "fcfs,continuum", "--rate", "2"]
    short = _simulate(workload, tmp_path / "short.json", *flags, "--kv-tokens", "60000")
    ample = _simulate(workload, tmp_path / "ample.json", *flags, "--kv-tokens", "400000")
    assert told(short[1].recomputed_tokens) < told(short[0].recomputed_tokens) / 2
    assert short[1].pins_ended["handed_over"] > 0
    assert {run.recomputed_tokens for run in ample} == {ample[0].recomputed_tokens}
    completion = [run.job_completion_s.mean for run in ample if run.job_completion_s is not None]
    assert completion[0] == pytest.approx(completion[1], rel=1e-3)


def test_a_run_ends_with_its_last_job(tmp_path: Path) -> None:
    """A pin with hours left is released with the last job, so no time is held in vain."""
    path = tmp_path / "jobs.jsonl"
    write_jobs(path, [_job(0)])
    flags = ["--policies", "fixed-ttl:10000", "--kv-tokens", "20000"]
    (run,) = _simulate(path, tmp_path / "a.json", *flags)
    assert run.pins_ended == {"handed_over": 5, "released": 1}
    assert run.held_in_vain_share == pytest.approx(0.0, abs=1e-3)


def test_host_memory_brings_back_what_the_pool_lost(workload: Path, tmp_path: Path) -> None:
    """With host memory fcfs loads what it would have recomputed, and is faster."""
    flags = ["--policies", "fcfs", "--rate", "2", "--kv-tokens", "60000"]
    (without,) = _simulate(workload, tmp_path / "without.json", *flags)
    (with_host,) = _simulate(workload, tmp_path / "with.json", *flags, "--host-kv-tokens", "400000")
    assert without.host_tokens_loaded is None
    assert with_host.host_tokens_loaded is not None
    assert with_host.host_tokens_loaded > 100_000
    assert told(with_host.computed_prefill_tokens) < told(without.computed_prefill_tokens) / 2
    assert with_host.job_completion_s is not None
    assert without.job_completion_s is not None
    assert with_host.job_completion_s.mean < without.job_completion_s.mean


def test_a_disk_brings_back_what_host_memory_lost(workload: Path, tmp_path: Path) -> None:
    """With little host memory a disk tier saves recomputing, and the run reports what was read. Without host
    memory a disk is useless."""
    flags = ["--policies", "fcfs", "--rate", "2", "--kv-tokens", "60000"]
    (without,) = _simulate(workload, tmp_path / "without.json", *flags, "--host-kv-tokens", "60000")
    flags += ["--disk-kv-tokens", "1000000"]
    (with_disk,) = _simulate(workload, tmp_path / "with.json", *flags, "--host-kv-tokens", "60000")
    assert without.disk_tokens_loaded is None
    assert with_disk.disk_tokens_loaded is not None
    assert with_disk.host_tokens_loaded is not None
    assert 10_000 < with_disk.disk_tokens_loaded <= with_disk.host_tokens_loaded
    assert told(with_disk.computed_prefill_tokens) < told(without.computed_prefill_tokens)
    assert any("disk: room for 1,000,000 tokens" in note for note in with_disk.notes)
    assert main(["simulate", "--workload", str(workload), *flags]) != 0


@pytest.mark.slow
def test_a_simulation_writes_the_trace_that_a_server_would(workload: Path, tmp_path: Path) -> None:
    """The trace has a decision per step and every turn's life, closed in order, and can be simulated."""
    trace = tmp_path / "new" / "trace.jsonl"
    flags = ["--rate", "2", "--kv-tokens", "60000", "--jobs", "4"]
    (run,) = _simulate(
        workload, tmp_path / "a.json", *flags, "--policies", "continuum", "--trace", str(trace)
    )
    report = TraceReport()
    events = list(read_trace(trace, report))
    assert isinstance(events[0], TraceHeader)
    assert isinstance(events[-1], TraceEnd)
    assert events[-1].dropped == 0
    ended = [event for event in events if isinstance(event, JobEvent) and event.kind == "turn_ended"]
    assert len(ended) == run.num_turns == 24
    assert sum(event.total_tokens for event in events if isinstance(event, StepDecision)) > 4 * 18_000
    (again,) = _simulate(trace, tmp_path / "again.json", *flags[:4], "--policies", "continuum")
    assert (again.num_turns, again.prompt_tokens) == (run.num_turns, run.prompt_tokens)


def test_several_replicas_share_the_jobs(workload: Path, tmp_path: Path) -> None:
    """If jobs stay together nothing is recomputed; round robin recomputes nearly everything."""
    flags = ["--policies", "fcfs", "--rate", "2", "--replicas", "3"]
    runs = {
        router: _simulate(workload, tmp_path / f"{router}.json", *flags, "--router", router)[0]
        for router in ROUTERS
    }
    for router in ("jobs", "prefix"):
        assert told(runs[router].recomputed_tokens) < told(runs["round-robin"].recomputed_tokens) / 5
    assert told(runs["session"].recomputed_tokens) < told(runs["round-robin"].recomputed_tokens) / 5
    assert runs["session"].setting.num_replicas == 3


OF_FILES = (
    "has no recorded arrival; choose another",
    "The limits leave no job of",
    "12 jobs were LEFT OUT: their context passes 4984 tokens.",
    "missing.json",
)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policies", "lifo"], "Unknown policy 'lifo'; choose from fcfs"),
        (["--policies", "fixed-ttl:soon"], "fixed-ttl:SECONDS must be a number of at least 0, got 'soon'"),
        (["--gpu", "abacus"], "abacus"),
        (["--arrivals", "bursty"], "--arrivals bursty needs --rate, in jobs per second."),
        (["--arrivals", "recorded"], "has no recorded arrival; choose another"),
        (["--max-context-tokens", "100"], "The limits leave no job of"),
        (["--kv-tokens", "5000"], "12 jobs were LEFT OUT: their context passes 4984 tokens."),
        (["--arrivals", "closed"], "--arrivals closed needs --concurrency, the number of jobs at once."),
        (["--router", "round-robin"], "--router has no effect with one replica: set --replicas."),
        (
            ["--kv-tokens", "9000", "--gpu-memory-utilization", "0.3"],
            "--gpu-memory-utilization has no effect with --kv-tokens",
        ),
        (
            ["--gpu-memory-utilization", "0.01"],
            "leaves no memory for KV at --gpu-memory-utilization 0.01: raise it or --tensor-parallel",
        ),
        (["--kv-tokens", "15"], "--kv-tokens is 15 tokens, less than one block of 16."),
        (["--kv-tokens", "1000000000"], "--kv-tokens makes 62,500,000 blocks in all replicas"),
        (["--host-kv-tokens", "5"], "--host-kv-tokens is 5 tokens, less than one block of 16."),
        (["--host-kv-tokens", "99999999999"], "a simulation keeps track of 10,000,000."),
        (["--profile", "missing.json", "--kv-tokens", "9"], "missing.json"),
        (["--profile", "missing.json", "--gpu", "h200"], "--gpu has no effect with --profile"),
        (["--seeds", "2", "--trace", "t.jsonl"], "--trace records a single run, but 4 were requested"),
        (["--policies", "fcfs", "--trace", "t.jsonl", "--replicas", "2"], "leave --replicas at 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    workload: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors have no traceback; exit code 1 for a file or the jobs, 2 for an option."""
    code = 1 if complaint in OF_FILES else 2
    assert main(["simulate", "--workload", str(workload), *flags]) == code
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("continuum: ")
    assert complaint in told


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--host-kv-tokens", "-5"], "--host-kv-tokens: must be 0 or more, got -5"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization: must be at most 1, got 2"),
        (["--rate", "1,2,1"], "--rate: has a number twice: 1,2,1"),
        (["--rate", "inf"], "--rate: must be finite, got inf"),
        (["--gap-cap-s", "inf"], "--gap-cap-s: must be finite, got inf"),
        (["--rate", "nan"], "--rate: must be 0 or more, got nan"),
        (["--seeds", "0"], "--seeds: must be at least 1, got 0"),
    ],
)
def test_a_senseless_number_is_refused(
    workload: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A senseless number gives exit code 2 and names the flag, as any wrong command line."""
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "--workload", str(workload), *flags])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    workload: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is checked before the run; an existing file is kept until the run is over."""
    old, nowhere = tmp_path / "old", workload / "out"
    old.write_text("an earlier result")
    other = "--html" if flag == "--json" else "--json"
    assert main(["simulate", "--workload", str(workload), flag, str(nowhere), other, str(old)]) == 1
    printed = capsys.readouterr()
    assert f"Cannot write the result {nowhere}: " in printed.err
    assert printed.out == ""
    assert main(["simulate", "--workload", str(workload), flag, str(tmp_path)]) == 1
    assert f"Cannot write the result {tmp_path}: Is a directory." in capsys.readouterr().err
    assert old.read_text() == "an earlier result"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_on_a_full_disk_the_table_is_printed_all_the_same(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is printed, with the reason why it was not saved."""
    flags = ["--jobs", "1", "--policies", "fcfs", "--json", "/dev/full"]
    assert main(["simulate", "--workload", str(workload), *flags]) == 1
    printed = capsys.readouterr()
    assert "job completion, mean s" in printed.out
    assert printed.err.endswith("Cannot write the result /dev/full: No space left on device.\n")
    assert main(["simulate", "--workload", str(workload), *flags[:4], "--trace", "/dev/full"]) == 0
    assert "the trace is NOT WHOLE: " in capsys.readouterr().out


def test_a_bad_line_of_the_workload_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file, line, turn and field."""
    path = tmp_path / "jobs.jsonl"
    write_jobs(path, [_job(0), _job(1)])
    lines = path.read_text().splitlines()
    bad = json.loads(lines[1])
    bad["turns"][2]["tool_s"] = -1
    path.write_text("\n".join([lines[0], json.dumps(bad)]) + "\n")
    assert main(["simulate", "--workload", str(path)]) == 1
    told = capsys.readouterr().err
    assert f"{path}, line 2" in told
    assert "tool_s" in told


@pytest.mark.slow
def test_layers_with_a_window_leave_blocks_to_others(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of gpt-oss-20b's layers hold 128 tokens: less is recomputed, and the trace replays."""
    trace = tmp_path / "trace.jsonl"
    on_gpt_oss = ["--model", "gpt-oss-20b", "--kv-tokens", "80000", "--rate", "2", "--policies", "continuum"]
    (hybrid,) = _simulate(workload, tmp_path / "a.json", *on_gpt_oss, "--trace", str(trace))
    all_full = "--disable-hybrid-kv-cache-manager"
    (whole,) = _simulate(workload, tmp_path / "b.json", *on_gpt_oss, all_full)
    assert hybrid.num_turns == whole.num_turns == 72
    assert told(hybrid.recomputed_tokens) < 0.5 * told(whole.recomputed_tokens)
    assert hybrid.job_completion_s is not None
    assert whole.job_completion_s is not None
    assert hybrid.job_completion_s.mean < whole.job_completion_s.mean
    header = next(iter(read_trace(trace)))
    assert isinstance(header, TraceHeader)
    assert header.kv_group_windows == [0, 128]
    assert header.num_blocks == 2 * 80_000 // 16
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["trace", "pins", str(trace)]) == 0
    created = next(e for e in read_trace(trace) if isinstance(e, PinEvent) and e.kind == "created")
    num_tokens = 8100 // 16 * 16  # All of full attention, and 8 blocks of a window of 128.
    assert created.num_blocks == num_tokens // 16 + 8
    assert pinned_tokens(header, created.num_blocks) == num_tokens


@pytest.mark.slow
def test_layers_with_states_share_the_memory_of_the_pool(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four tenths of 100,000 tokens of KV are 12 states of Qwen3-Next; a pin holds one, and the trace
    replays. A pool with fewer states than a sequence may need is refused."""
    trace = tmp_path / "trace.jsonl"
    flags = ["--model", "qwen3-next-80b-a3b", "--rate", "2", "--policies", "continuum"]
    (run,) = _simulate(workload, tmp_path / "a.json", *flags, "--kv-tokens", "100000", "--trace", str(trace))
    assert run.num_turns == 72
    header = next(iter(read_trace(trace)))
    assert isinstance(header, TraceHeader)
    assert header.num_states == 12
    assert header.num_blocks == (100_000 - 12 * 3144) // 16
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
    created = next(e for e in read_trace(trace) if isinstance(e, PinEvent) and e.kind == "created")
    assert created.num_blocks == 8100 // 16 + -(-3144 // 16)  # Its KV blocks, and a state's equivalent.
    arguments = ["simulate", "--workload", str(workload), *flags, "--kv-tokens", "60000"]
    assert main(arguments) != 0
    assert "leave memory for 7 states of qwen3-next-80b-a3b" in capsys.readouterr().err
    assert main([*arguments[:-1], "100000", "--host-kv-tokens", "100000"]) != 0
    assert "needs a model without states" in capsys.readouterr().err


@pytest.mark.slow
def test_layers_of_chunks_leave_blocks_to_others(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of four layers of Llama 4 Scout hold a chunk: less is recomputed, and the trace replays."""
    trace = tmp_path / "trace.jsonl"
    on_scout = ["--model", "llama-4-scout", "--tensor-parallel", "4", "--rate", "0.5"]
    on_scout += ["--kv-tokens", "60000", "--policies", "continuum"]
    (hybrid,) = _simulate(workload, tmp_path / "a.json", *on_scout, "--trace", str(trace))
    all_full = "--disable-hybrid-kv-cache-manager"
    (whole,) = _simulate(workload, tmp_path / "b.json", *on_scout, all_full)
    assert hybrid.num_turns == whole.num_turns == 72
    assert told(hybrid.recomputed_tokens) < told(whole.recomputed_tokens)
    header = next(iter(read_trace(trace)))
    assert isinstance(header, TraceHeader)
    assert header.kv_group_chunks == [0, 8192, 8192, 8192]
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["trace", "pins", str(trace)]) == 0


@pytest.mark.slow
def test_a_host_tier_keeps_windows_small(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes of a pool and a host tier sized for full attention hold much more of gpt-oss, so more is
    found and less is loaded or recomputed. The trace replays."""
    trace = tmp_path / "trace.jsonl"
    flags = ["--model", "gpt-oss-20b", "--rate", "2", "--kv-tokens", "40000", "--host-kv-tokens", "90000"]
    flags += ["--disk-kv-tokens", "40000", "--policies", "continuum"]
    (hybrid,) = _simulate(workload, tmp_path / "a.json", *flags, "--trace", str(trace))
    all_full = "--disable-hybrid-kv-cache-manager"
    (whole,) = _simulate(workload, tmp_path / "b.json", *flags, all_full)
    assert hybrid.num_turns == whole.num_turns == 72
    assert told(hybrid.recomputed_tokens) < 0.5 * told(whole.recomputed_tokens)
    assert hybrid.host_tokens_loaded is not None
    assert hybrid.host_tokens_loaded > 0
    header = next(iter(read_trace(trace)))
    assert isinstance(header, TraceHeader)
    assert header.kv_group_windows == [0, 128]
    assert header.num_host_blocks == 2 * 90_000 // 16
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["trace", "replay", str(trace), "--policy", "fcfs"]) == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_policy_that_fails_is_named_with_its_line(
    processes: str,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is one sentence without the simulator's own frames."""
    source = "from engine.core.policy import FcfsPolicy\nclass Odd(FcfsPolicy):\n"
    source += "    def __init__(self, context): ...\n    def waiting_key(self, request, now):\n"
    source += "        return request.no_such_thing\n"
    name = f"failing_policy_{processes}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--policies", f"{name}:Odd,fcfs", "--rate", "1", "--processes", processes]
    assert main(["simulate", "--workload", str(workload), *flags]) == 1
    told = capsys.readouterr().err
    assert f"{name}.py:5, in waiting_key: AttributeError" in told
    assert "Traceback" not in told
