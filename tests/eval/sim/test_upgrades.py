"""A rolling upgrade in simulated time: what is paused moves, or is computed again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from continuum.cli.main import main
from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from eval.errors import UsageError
from tests.eval.sim.test_simulator import CONFIG, CONTINUUM, _job, _policy, _run, _turn

FLEET = replace(CONFIG, num_replicas=2, kv_tokens=2000, upgrade_s=20.0, kv_transfer_gb_s=1e-6)
HOLDS = _policy("holds", ContinuumPolicyFactory(ContinuumConfig(ttl_rule="fixed", fixed_ttl_s=500.0)))
LONG = _job("job", _turn(200, 0, 8, gap_s=80.0), _turn(230, 208, 2))
"""Both replicas are replaced while its tool runs."""


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_paused_job_finds_its_kv_or_computes_it_again(hands_over: bool) -> None:
    """Of 208 tokens 51 blocks are full of computed ones. To read them takes time; to compute them steps."""
    run = _run([LONG], config=replace(FLEET, upgrade_hands_over=hands_over), policy=HOLDS)
    first, second = run.turns
    assert second.start_s > first.start_s + 80
    assert second.cached_tokens == (204 if hands_over else 0)
    assert run.counters.computed_prefill_tokens == 200 + (26 if hands_over else 230)
    assert second.receipt is not None
    assert second.receipt.turn == 2
    assert second.receipt.recomputed_tokens == (0 if hands_over else 204)


@pytest.mark.parametrize("seed", range(6))
def test_all_jobs_end_whenever_replicas_are_replaced(seed: int) -> None:
    """Random jobs on three small replicas, at random times."""
    random = Random(seed)
    jobs = []
    for number in range(12):
        length, turns = random.randrange(8, 90), []
        for _ in range(random.randrange(1, 5)):
            turns.append(_turn(length, max(0, length - 20), 6, gap_s=random.random() * 40))
            length += random.randrange(10, 60)
        jobs.append(_job(f"job-{number}", *turns, _turn(length, max(0, length - 10), 3)))
    config = replace(
        FLEET,
        num_replicas=3,
        kv_tokens=600,
        upgrade_s=random.choice((2.0, 9.0)),
        upgrade_hands_over=seed % 2 == 0,
    )
    run = _run(jobs, [random.random() * 60 for _ in jobs], config=config, policy=CONTINUUM)
    assert sum(job.num_turns for job in run.jobs) == len(run.turns) == sum(len(job.turns) for job in jobs)
    assert run.counters.kv_usage_at_end == 0


def test_what_cannot_be_replaced_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--upgrade-s needs at least two --replicas"):
        replace(CONFIG, upgrade_s=3.0)
    assert main(["simulate", "--workload", "synthetic", "--no-handover"]) == 2
    assert "--no-handover has no effect without --upgrade-s" in capsys.readouterr().err
