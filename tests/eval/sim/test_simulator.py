"""The simulator on jobs whose course can be computed by hand, and properties of any job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.config.engine_config import SchedulerConfig
from engine.core.policy import PolicyFactory, fcfs
from eval.baselines.knowledge import NamedPolicy
from eval.errors import WorkloadError
from eval.sim.block_chains import BlockNames, JobChain
from eval.sim.sim_config import SimConfig
from eval.sim.simulator import SimRun, Simulator
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from tests.eval.sim.plain_cost import PlainCost

BLOCK = 4
CONFIG = SimConfig(
    cost=PlainCost(step_overhead_s=1.0, arrival_overhead_s=0.25, reply_overhead_s=0.5),
    kv_tokens=400,
    block_size=BLOCK,
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
)


def _policy(name: str, make: PolicyFactory) -> NamedPolicy:
    return NamedPolicy(name, lambda context, _: make(context))


FCFS = _policy("fcfs", fcfs)
CONTINUUM = _policy("continuum", ContinuumPolicyFactory(ContinuumConfig()))


def _turn(input_tokens: int, prefix_tokens: int, output_tokens: int, gap_s: float | None = None) -> Turn:
    if gap_s is None:
        return Turn(input_tokens=input_tokens, prefix_tokens=prefix_tokens, output_tokens=output_tokens)
    return Turn(
        input_tokens=input_tokens,
        prefix_tokens=prefix_tokens,
        output_tokens=output_tokens,
        gap_kind=GapKind.TOOL,
        gap_s=gap_s,
        calls=(ToolRun("bash", "ls", gap_s),),
    )


def _job(job_id: str, *turns: Turn, parent: str | None = None) -> Job:
    return Job(job_id=job_id, source="by hand", turns=turns, parent_job=parent)


TWO_TURNS = _job("job", _turn(40, 0, 4, gap_s=10.0), _turn(60, 44, 2))


def _run(
    jobs: list[Job],
    arrivals_s: list[float] | None = None,
    *,
    config: SimConfig = CONFIG,
    policy: NamedPolicy = FCFS,
    concurrency: int | None = None,
) -> SimRun:
    roots = [job for job in jobs if job.parent_job is None]
    return Simulator(config, policy, jobs).run(arrivals_s or [0.0] * len(roots), concurrency)


def test_a_turn_recorded_without_output_ends_with_its_first_token() -> None:
    """The first token fills the last block of the prompt."""
    run = _run([_job("job", _turn(39, 0, 0, gap_s=1.0), _turn(43, 39, 2))])
    assert [turn.output_tokens for turn in run.turns] == [1, 2]


def test_a_job_alone_takes_what_its_steps_and_gaps_take() -> None:
    """40 prompt tokens take two steps of at most 32, the second of which samples; then a step per token."""
    run = _run([TWO_TURNS], [3.0])
    first, second = run.turns
    assert (first.start_s, first.ttft_s, first.latency_s) == (3.0, 0.25 + 2 + 0.5, 0.25 + 2 + 3 + 0.5)
    assert first.gap_s == 10.0
    assert second.start_s == 3.0 + 5.75 + 10.0
    # 11 full blocks, 44 tokens, but the last sampled token was never computed: 10 blocks are cached.
    assert (second.cached_tokens, second.recomputed_tokens) == (40, 4)
    assert second.ttft_s == 0.25 + 1 + 0.5
    (job,) = run.jobs
    assert job.completion_s == pytest.approx(5.75 + 10 + 2.75)
    assert run.counters.computed_prefill_tokens == 40 + 20
    assert run.counters.kv_usage_at_end == 0


def test_jobs_share_the_steps() -> None:
    """Two concurrent jobs share one budget: the second one's prompt waits for the first one's."""
    alone = _run([_job("a", _turn(32, 0, 8))])
    both = _run([_job("a", _turn(32, 0, 8)), _job("b", _turn(32, 0, 8))])
    assert alone.jobs[0].completion_s < both.jobs[1].completion_s < 2 * alone.jobs[0].completion_s


def test_a_job_with_a_better_priority_is_served_first() -> None:
    """The agent policy serves the better priority first of three waiting jobs; ``fcfs`` ignores it."""
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_seqs=1))
    ranks = {"first": 0, "worse": 1, "better": -1}
    jobs = [replace(_job(name, _turn(20, 0, 4)), priority=rank) for name, rank in ranks.items()]
    for policy, served in ((CONTINUUM, ["first", "better", "worse"]), (FCFS, ["first", "worse", "better"])):
        run = _run(jobs, [0.0, 0.5, 0.6], config=config, policy=policy)
        assert [job.job_id for job in sorted(run.jobs, key=lambda job: job.end_s)] == served


def test_a_closed_loop_starts_a_job_when_one_ends() -> None:
    """At concurrency 1 jobs follow each other, and a job's time counts from its admission."""
    jobs = [_job(f"job {i}", _turn(32, 0, 4)) for i in range(3)]
    run = _run(jobs, concurrency=1)
    assert [job.start_s for job in run.jobs] == [0.0, 4.75, 9.5]
    assert {job.completion_s for job in run.jobs} == {4.75}


def test_a_parent_waits_for_its_sub_agents() -> None:
    """The gap lasts until the spawned job is done, and at least as long as the tool."""
    child = _job("child", _turn(32, 0, 8), parent="parent")
    spawning = replace(_turn(40, 0, 4, gap_s=1.0), spawns=("child",))
    run = _run([_job("parent", spawning, _turn(60, 44, 2)), child])
    child_record = next(job for job in run.jobs if job.job_id == "child")
    returned = next(turn for turn in run.turns if (turn.job_id, turn.turn) == ("parent", 2))
    assert child_record.start_s == 5.75
    assert returned.start_s == child_record.end_s
    assert child_record.parent_job == "parent"
    assert returned.start_s > 5.75 + 1.0


def test_a_pin_brings_a_job_back_to_its_kv_under_pressure() -> None:
    """While a job's tool runs another fills the pool: fcfs recomputes the prompt, continuum does not."""
    jobs = [
        _job("returns", _turn(200, 0, 4, gap_s=5.0), _turn(212, 204, 2)),
        _job("goes on", _turn(20, 0, 60)),
        _job("fills", _turn(300, 0, 8)),
    ]
    lost, kept = (_run(jobs, [0.0, 0.0, 8.0], policy=policy) for policy in (FCFS, CONTINUUM))
    recomputed = [turn.recomputed_tokens for run in (lost, kept) for turn in run.turns if turn.turn == 2]
    assert recomputed == [152, 4]
    assert kept.counters.pins_ended["handed_over"] == 1
    assert kept.counters.pin_block_s["handed_over"] == pytest.approx(50 * 6, abs=50)
    assert lost.counters.pins_ended == {}


def test_a_router_keeps_a_job_where_its_kv_is() -> None:
    """With two replicas round robin sends the second turn to the one without the job's KV."""
    runs = {
        name: _run([TWO_TURNS], config=replace(CONFIG, num_replicas=2, router=name))
        for name in ("jobs", "session", "round-robin")
    }
    cached = {name: [turn.cached_tokens for turn in run.turns] for name, run in runs.items()}
    assert cached == {"jobs": [0, 40], "session": [0, 40], "round-robin": [0, 0]}
    assert [turn.replica for turn in runs["round-robin"].turns] == [0, 1]


def test_a_sub_agent_goes_to_the_replica_that_has_its_parents_prefix() -> None:
    """The same holds for an unnamed one, whose prompt begins like its parent's; an unrelated job goes
    elsewhere."""

    def sharing(job: Job) -> Job:
        return replace(job, shared_prefix="agent", shared_prefix_tokens=128)

    child = replace(sharing(_job("child", _turn(160, 0, 4), parent="parent")), is_known=False)
    spawning = replace(_turn(140, 0, 4, gap_s=1.0), spawns=("child",))
    parent = sharing(_job("parent", spawning, _turn(160, 144, 2)))
    config = replace(CONFIG, num_replicas=2, router="jobs", share_prefixes=True)
    run = _run([parent, child, _job("stranger", _turn(160, 0, 4))], [0.0, 0.5], config=config)
    replicas = {turn.job_id: turn.replica for turn in run.turns}
    assert replicas["child"] == replicas["parent"] != replicas["stranger"]


def test_jobs_with_one_system_prompt_share_it_if_asked() -> None:
    """Recorded agents begin with the same words; a setting decides whether they share blocks."""
    first, second = (
        replace(_job(name, _turn(64, 0, 4)), shared_prefix="agent", shared_prefix_tokens=50) for name in "ab"
    )
    cached = [
        _run([first, second], [0.0, 20.0], config=replace(CONFIG, share_prefixes=share))
        .turns[1]
        .cached_tokens
        for share in (False, True)
    ]
    assert cached == [0, 48]


def test_a_job_that_never_fits_is_one_sentence() -> None:
    """The job is refused at once, not after minutes."""
    with pytest.raises(WorkloadError, match=r"Job big needs 401 tokens of KV at once; the pool holds 400\."):
        _run([_job("big", _turn(400, 0, 1))])


@st.composite
def _jobs(draw: st.DrawFn) -> Job:
    """A job whose turns share any part of earlier ones, with or without recorded blocks."""
    turns: list[Turn] = []
    context = 0
    for _ in range(draw(st.integers(1, 5))):
        prefix_tokens = draw(st.integers(0, context)) if turns else 0
        input_tokens = prefix_tokens + draw(st.integers(1, 40))
        output_tokens = draw(st.integers(1, 12))
        context = input_tokens + output_tokens
        turns.append(
            _turn(input_tokens, prefix_tokens, output_tokens, draw(st.sampled_from((0.0, 3.0, 40.0))))
        )
    return _job(f"job {draw(st.integers(0, 10**9))}", *turns)


@pytest.mark.slow
@given(st.lists(_jobs(), min_size=1, max_size=6, unique_by=lambda job: job.job_id), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_job_ends_and_the_same_jobs_give_the_same_run(jobs: list[Job], pins: bool) -> None:
    """For any jobs every turn is answered once, no block stays held, and a second run is equal."""
    policy = CONTINUUM if pins else FCFS
    config = replace(CONFIG, kv_tokens=max(job.max_context_tokens for job in jobs) + 2 * BLOCK)
    run, again = (_run(jobs, config=config, policy=policy) for _ in range(2))
    assert [
        (turn.job_id, turn.turn) for turn in sorted(run.turns, key=lambda t: (t.job_id, t.turn))
    ] == sorted((job.job_id, number + 1) for job in jobs for number in range(len(job.turns)))
    assert run.counters.kv_usage_at_end == 0
    assert (run.turns, run.jobs, run.counters) == (again.turns, again.jobs, again.counters)


@given(_jobs(), st.sampled_from((1, 4, 8)))
def test_a_chain_shares_what_the_turns_share(job: Job, block_size: int) -> None:
    """Two turns have the same block exactly where all its tokens are shared."""
    chain = JobChain(BlockNames(block_size), job)
    before: list[bytes] = []
    for index, turn in enumerate(job.turns):
        blocks = chain.turn(index)
        assert len(blocks) == len(set(blocks)) == (turn.input_tokens + turn.output_tokens) // block_size
        num_shared = turn.prefix_tokens // block_size
        assert blocks[:num_shared] == before[:num_shared]
        assert not set(blocks[num_shared:]) & set(before)
        before = blocks


def test_recorded_blocks_are_shared_across_jobs_of_a_scope() -> None:
    """Ids of 8-token blocks are two of ours each; an answer's blocks have the names in the next recorded
    prompt."""
    names = BlockNames(BLOCK)
    first = Job(
        job_id="a",
        source="by hand",
        turns=(
            Turn(input_tokens=20, prefix_tokens=0, output_tokens=6, gap_s=1.0, block_runs=((7, 2),)),
            Turn(input_tokens=32, prefix_tokens=26, output_tokens=4, block_runs=((7, 4),)),
        ),
        block_size=8,
        block_scope="everyone",
    )
    second = replace(first, job_id="b", turns=first.turns[1:])
    chain = JobChain(names, first)
    opening, following = chain.turn(0), chain.turn(1)
    assert opening == following[:6]
    assert JobChain(names, second).turn(0)[:8] == following[:8]
    assert JobChain(names, replace(second, block_scope="others")).turn(0)[0] not in following
