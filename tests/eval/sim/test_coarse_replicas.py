"""``--replica-model coarse`` agrees with the step-by-step simulation, and states what it omits."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum.cli.main import main
from engine.config.engine_config import SchedulerConfig
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import fcfs
from eval.baselines.knowledge import NamedPolicy
from eval.report.metrics import RunResult
from eval.report.results import read_results
from eval.sim.replicas.make import REPLICA_MODELS
from eval.sim.replicas.prefix_tree import Node, PrefixTree
from eval.sim.sim_config import SimConfig
from eval.sim.simulator import SimRun, Simulator
from eval.workloads.job import GapKind, Job, Turn
from eval.workloads.recorded import write_jobs
from tests.eval.sim.plain_cost import PlainCost

CAPACITY = 12
FCFS = NamedPolicy("fcfs", lambda context, _: fcfs(context))


def _job(number: int, num_turns: int, first: int = 6000, gap_s: float = 4.0) -> Job:
    turns = []
    for index in range(num_turns):
        context = first + 1500 * index
        is_last = index + 1 == num_turns
        turns.append(
            Turn(
                input_tokens=context,
                prefix_tokens=context - 1440 if index else 0,
                output_tokens=60 + 10 * (number % 5),
                gap_kind=GapKind.END if is_last else GapKind.TOOL,
                gap_s=None if is_last else gap_s,
            )
        )
    return Job(
        job_id=f"job {number}",
        source="by hand",
        turns=tuple(turns),
        shared_prefix="agent",
        shared_prefix_tokens=2000,
    )


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "jobs.jsonl"
    write_jobs(path, [_job(number, 4 + number % 7) for number in range(40)])
    return path


def _runs(workload: Path, out: Path, *flags: str) -> list[RunResult]:
    """The runs of the exact model and of the coarse one."""
    runs = []
    for model in REPLICA_MODELS:
        words = ["simulate", "--workload", str(workload), "--policies", "fcfs", "--replica-model", model]
        assert main([*words, "--share-prefixes", *flags, "--json", str(out / f"{model}.json")]) == 0
        runs += read_results(out / f"{model}.json").runs
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "flags", "within"),
    [
        ("jobs", ["--rate", "1"], 0.02),
        ("least-loaded", ["--rate", "1"], 0.05),
        ("session", ["--rate", "4"], 0.05),
        ("round-robin", ["--rate", "4", "--kv-tokens", "60000"], 0.1),
    ],
)
def test_it_agrees_with_the_simulation_of_each_step(
    router: str, flags: list[str], within: float, workload: Path, tmp_path: Path
) -> None:
    """The models agree with idle pools, with full ones, and with scattered jobs."""
    exact, coarse = _runs(workload, tmp_path, "--replicas", "3", "--router", router, *flags)
    assert (coarse.num_completed_jobs, coarse.num_turns) == (exact.num_completed_jobs, exact.num_turns)
    assert coarse.output_tokens == exact.output_tokens
    assert coarse.hit_rate == pytest.approx(exact.hit_rate, abs=within)
    assert coarse.job_completion_s is not None
    assert exact.job_completion_s is not None
    assert coarse.job_completion_s.mean == pytest.approx(exact.job_completion_s.mean, rel=within)
    assert coarse.kv_usage_at_end == exact.kv_usage_at_end == 0
    assert any("COARSELY" in note for note in coarse.notes)


def _run(model: str, *jobs: Job) -> SimRun:
    config = SimConfig(
        cost=PlainCost(step_overhead_s=1.0, token_s=0.001, arrival_overhead_s=0.25, reply_overhead_s=0.5),
        kv_tokens=40_000,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048),
        replica_model=model,
    )
    return Simulator(config, FCFS, list(jobs)).run([0.0, *([3.4] * (len(jobs) - 1))])


def test_a_job_alone_takes_the_same_steps() -> None:
    exact, coarse = (_run(model, _job(0, 5)) for model in REPLICA_MODELS)
    assert coarse.num_steps == exact.num_steps
    assert coarse.counters.computed_prefill_tokens == exact.counters.computed_prefill_tokens
    assert [turn.ttft_s for turn in coarse.turns] == pytest.approx([turn.ttft_s for turn in exact.turns])
    assert coarse.jobs[0].end_s == pytest.approx(exact.jobs[0].end_s)


def test_one_that_arrives_while_another_decodes_waits_for_a_step_only() -> None:
    exact, coarse = (_run(model, _job(0, 1, 2000), _job(1, 1, 2000)) for model in REPLICA_MODELS)
    for one, other in zip(exact.turns, coarse.turns, strict=True):
        assert other.ttft_s == pytest.approx(one.ttft_s)
        assert other.latency_s == pytest.approx(one.latency_s)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policies", "fcfs,continuum"], "supports only the policy fcfs, not continuum"),
        (["--host-kv-tokens", "90000"], "leave out --host-kv-tokens"),
        (["--model", "gpt-oss-20b"], "every layer keeps the KV of all tokens"),
        (["--trace", "t.jsonl"], "leave out --replica-model coarse"),
        (["--replica-model", "exact", "--prefill-replicas", "2"], "--prefill-replicas needs --replica-model"),
        (["--kv-transfer-gb-s", "9"], "--kv-transfer-gb-s has no effect without --prefill-replicas"),
    ],
)
def test_what_it_leaves_out_is_refused(
    workload: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--workload", str(workload), "--policies", "fcfs", "--replica-model", "coarse"]
    assert main([*words, "--processes", "1", *flags]) == 2
    assert complaint in capsys.readouterr().err


class _Blocks:
    """The same cache block by block: an LRU list of names; of a released chain the tail is evicted first."""

    def __init__(self) -> None:
        self.held: dict[BlockHash, int] = {}
        self.free: OrderedDict[BlockHash, None] = OrderedDict()

    def match(self, chain: list[BlockHash]) -> int:
        known = [name in self.held or name in self.free for name in chain]
        return known.index(False) if False in known else len(chain)

    def hold(self, chain: list[BlockHash]) -> None:
        for name in chain:
            self.free.pop(name, None)
            self.held[name] = self.held.get(name, 0) + 1
            if len(self.held) + len(self.free) > CAPACITY:
                self.free.popitem(last=False)

    def release(self, chain: list[BlockHash]) -> None:
        for name in reversed(chain):
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]
                self.free[name] = None


def _chain(draw: Any) -> list[BlockHash]:
    """A path through a tree with three branches at each step."""
    ways = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
    return [BlockHash("".join(ways[: index + 1]).encode()) for index in range(len(ways))]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_the_tree_keeps_what_an_lru_of_blocks_keeps(data: Any) -> None:
    """For any chains, held concurrently and released, the tree keeps the same blocks as an LRU list."""
    tree, blocks = PrefixTree(CAPACITY), _Blocks()
    open_turns: list[tuple[Node, list[BlockHash]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if open_turns and data.draw(st.booleans()):
            end, chain = open_turns.pop(data.draw(st.integers(0, len(open_turns) - 1)))
            tree.release(end)
            blocks.release(chain)
        else:
            chain = _chain(data.draw)
            node, depth = tree.match(chain)
            assert depth == blocks.match(chain)
            num_new = len(chain) - depth + tree.num_not_held(node)
            if num_new <= CAPACITY - tree.num_held:
                tree.hold(node)
                open_turns.append((tree.append(node, chain[depth:]), chain))
                blocks.hold(chain)
        assert tree.num_held == len(blocks.held)
        assert tree.num_blocks == len(blocks.held) + len(blocks.free)


def test_a_request_is_told_what_it_was_told_by_the_scheduler() -> None:
    """A coarse turn has all fields that reports read."""
    (turn,) = _run("coarse", _job(0, 1)).turns
    assert (turn.cached_tokens, turn.output_tokens, turn.queued_s) == (0, 60, 0.0)
    assert turn.finish_reason == "length"


def test_a_prompt_is_computed_on_one_side_and_decoded_on_the_other() -> None:
    """Computed by hand with 1 s a step, 1 ms a token, KV at 100 tokens a second, 0.25 s to the queue and 0.5
    s back. The second turn fetches what the first has not left."""
    config = SimConfig(
        cost=PlainCost(step_overhead_s=1.0, token_s=0.001, arrival_overhead_s=0.25, reply_overhead_s=0.5),
        kv_tokens=4000,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048),
        replica_model="coarse",
        num_prefill_replicas=1,
        kv_transfer_gb_s=100e-9,
    )
    turns = (
        Turn(input_tokens=401, prefix_tokens=0, output_tokens=3, gap_kind=GapKind.TOOL, gap_s=2.0),
        Turn(input_tokens=801, prefix_tokens=400, output_tokens=2),
    )
    run = Simulator(config, FCFS, [Job(job_id="job", source="by hand", turns=turns)]).run([0.0])
    first, second = run.turns
    fetched_s = 0.25 + 1.401 + 0.75 + 4.0
    assert first.ttft_s == pytest.approx(fetched_s + 1.001 + 0.5)
    assert first.latency_s == pytest.approx(fetched_s + 3 * 1.001 + 0.5)
    assert (first.cached_tokens, second.cached_tokens) == (0, 400)
    assert second.ttft_s == pytest.approx(0.25 + 1.401 + 0.75 + 4.0 + 1.001 + 0.5)
    assert run.counters.computed_prefill_tokens == 401 + 401 + 2
    assert run.counters.kv_usage_at_end == 0


def test_what_is_new_in_few_tokens_is_computed_where_it_is_decoded(workload: Path, tmp_path: Path) -> None:
    """If no prompt exceeds the limit, nothing is sent to the prefill replicas."""
    words = ["simulate", "--workload", str(workload), "--policies", "fcfs", "--replica-model", "coarse"]
    words += ["--rate", "1", "--json", str(tmp_path / "out.json")]
    results = []
    for extra in ([], ["--prefill-replicas", "1", "--prefill-above", "90000"]):
        assert main([*words, *extra]) == 0
        results += read_results(tmp_path / "out.json").runs
    whole, same = results
    assert same.ttft_s == whole.ttft_s
    assert same.job_completion_s == whole.job_completion_s
    assert any("more than 90,000 new tokens" in note for note in same.notes)


@pytest.mark.slow
def test_splitting_a_fleet_changes_when_tokens_come_and_nothing_else(workload: Path, tmp_path: Path) -> None:
    """Splitting a fleet changes only times: a first token waits for a transfer, later ones for no prompt."""
    flags = ["--policies", "fcfs", "--replica-model", "coarse", "--rate", "2"]
    runs = []
    for name, replicas in (("whole", ["--replicas", "4"]), ("split", ["--replicas", "2"])):
        split = ["--prefill-replicas", "2"] if name == "split" else []
        words = ["simulate", "--workload", str(workload), *flags, *replicas, *split]
        assert main([*words, "--json", str(tmp_path / f"{name}.json")]) == 0
        runs += read_results(tmp_path / f"{name}.json").runs
    whole, split_run = runs
    assert split_run.setting.num_replicas == whole.setting.num_replicas == 4
    assert split_run.num_turns == whole.num_turns
    assert split_run.output_tokens == whole.output_tokens
    assert any("50 GB/s a replica" in note for note in split_run.notes)
