"""Selection of jobs: limits report what they remove, draws are fair and reproducible, families stay whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.errors import WorkloadError
from eval.workloads.catalog import open_workload
from eval.workloads.checks import complaint_about
from eval.workloads.families import roots
from eval.workloads.job import GapKind, Job
from eval.workloads.sampling import JobLimits, draw, limited
from tests.eval.workloads.jobs import chain, job


def family(name: str, num_turns: int = 4) -> list[Job]:
    """A job whose second turn starts two sub-agents, of which the first starts one more."""
    turns = list(chain(num_turns))
    turns[1] = replace(turns[1], spawns=(f"{name}.x", f"{name}.y"))
    child = list(chain(2))
    child[0] = replace(child[0], spawns=(f"{name}.x.x",))
    return [
        job(name, *turns),
        job(f"{name}.x", *child, parent_job=name),
        job(f"{name}.y", *chain(1), parent_job=name),
        job(f"{name}.x.x", *chain(1), parent_job=f"{name}.x"),
    ]


FAMILIES = [member for name in "abcde" for member in family(name)]


@given(num_jobs=st.integers(1, 17), seed=st.none() | st.integers(0, 99))
def test_a_draw_is_fair_and_repeatable_and_keeps_families_whole(num_jobs: int, seed: int | None) -> None:
    """A draw has the requested number of roots, each equally often (within one), with unique ids, and every
    sub-agent with its parent and named by one of its turns."""
    jobs = draw(FAMILIES, num_jobs, seed).jobs
    assert jobs == draw(FAMILIES, num_jobs, seed).jobs
    drawn = roots(jobs)
    assert len(drawn) == num_jobs
    assert len({job.job_id for job in jobs}) == len(jobs) == 4 * num_jobs
    times = [sum(job.job_id.partition("#")[0] == name for job in drawn) for name in "abcde"]
    assert max(times) - min(times) <= 1
    spawned = {child: job.job_id for job in jobs for turn in job.turns for child in turn.spawns}
    assert spawned == {job.job_id: job.parent_job for job in jobs if job.parent_job is not None}


def test_a_seed_changes_what_is_drawn() -> None:
    """Without a seed the first ones are taken; different seeds draw differently."""
    assert [job.job_id for job in roots(draw(FAMILIES, 3, None).jobs)] == ["a", "b", "c"]
    assert len({tuple(job.job_id for job in draw(FAMILIES, 3, seed).jobs) for seed in range(20)}) > 5


def test_a_copy_shares_blocks_only_where_equal_ids_are_equal_content() -> None:
    """A scope that one family uses is renamed in its copy; one that several use stays."""
    jobs = [
        job("a", block_size=16, block_scope="a", arrival_s=0.0),
        job("b", block_size=16, block_scope="everyone", arrival_s=10.0),
        job("c", block_size=16, block_scope="everyone", arrival_s=20.0),
    ]
    sample = draw(jobs, 6, None)
    assert [(job.job_id, job.block_scope) for job in sample.jobs[3:]] == [
        ("a#2", "a#2"),
        ("b#2", "everyone"),
        ("c#2", "everyone"),
    ]
    assert [job.arrival_s for job in sample.jobs] == [0, 10, 20, 30, 40, 50]
    assert sample.notes == ["jobs are REPEATED: 6 were asked for, there are 3"]


def test_jobs_that_are_too_long_are_left_out_with_their_families() -> None:
    """The longest turn counts, also a sub-agent's, and the number of removed jobs is reported."""
    jobs = [*FAMILIES, *family("long", num_turns=9)]
    sample = limited(jobs, JobLimits(max_context_tokens=500))
    assert sample.jobs == [member for name in "abcde" for member in draw(family(name), 1, None).jobs]
    assert sample.notes == ["1 jobs were LEFT OUT: their context passes 500 tokens"]


def test_jobs_can_be_cut_at_the_context_instead() -> None:
    """The turns before the limit stay; the last of them ends the job."""
    sample = limited(
        [job("a", *chain(9)), job("b", *chain(3))], JobLimits(max_context_tokens=440, cut_at_context=True)
    )
    assert [len(job.turns) for job in sample.jobs] == [4, 3]
    last = sample.jobs[0].turns[-1]
    assert (last.gap_kind, last.gap_s, last.calls) == (GapKind.END, None, ())
    assert sample.notes == ["1 jobs were CUT to fewer turns"]


def test_a_cut_takes_the_sub_agents_of_the_turns_it_takes() -> None:
    """A job cut at the turn that starts sub-agents starts none, and does not wait for them."""
    sample = limited(FAMILIES, JobLimits(max_turns=2))
    assert len(sample.jobs) == 5
    assert not any(turn.spawns for job in sample.jobs for turn in job.turns)
    assert sample.notes == [
        "5 jobs were CUT to fewer turns",
        "15 sub-agents were left out with the turns that start them",
    ]


@given(
    max_turns=st.none() | st.integers(1, 5),
    max_context_tokens=st.none() | st.integers(90, 600),
    cut_at_context=st.booleans(),
    gap_cap_s=st.none() | st.floats(0, 2),
)
def test_limits_leave_legal_jobs(
    max_turns: int | None, max_context_tokens: int | None, cut_at_context: bool, gap_cap_s: float | None
) -> None:
    """For any limits the remaining jobs keep them and are valid, and a turn starts each sub-agent."""
    limits = JobLimits(
        max_turns=max_turns,
        max_context_tokens=max_context_tokens,
        cut_at_context=cut_at_context,
        gap_cap_s=gap_cap_s,
    )
    jobs = limited(FAMILIES, limits).jobs
    for left in jobs:
        assert complaint_about(left) is None
        assert len(left.turns) <= (max_turns or 99)
        assert left.max_context_tokens <= (max_context_tokens or 9999)
        assert all(
            turn.gap_s is None or turn.gap_s <= (9 if gap_cap_s is None else gap_cap_s) for turn in left.turns
        )
    spawned = {child: job.job_id for job in jobs for turn in job.turns for child in turn.spawns}
    assert spawned == {job.job_id: job.parent_job for job in jobs if job.parent_job is not None}


def test_made_jobs_are_made_until_enough_are_within_the_limits() -> None:
    """For 20 jobs within 100k tokens 20 are made, and the number of longer ones is reported."""
    sample = open_workload("bfcl").sample(20, 1, JobLimits(max_context_tokens=100_000))
    assert len(sample.jobs) == 20
    assert max(job.max_context_tokens for job in sample.jobs) <= 100_000
    assert "jobs were LEFT OUT: their context passes 100000 tokens" in sample.notes[0]
    with pytest.raises(WorkloadError, match="The limits leave only 0 of 100 jobs of bfcl"):
        open_workload("bfcl").sample(1, 1, JobLimits(max_context_tokens=10))
