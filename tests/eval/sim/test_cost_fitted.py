"""Costs are fitted to steps with known true costs, and are saved to a file."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from eval.errors import CostModelError
from eval.sim.cost_model import StepWork
from eval.sim.fitted import CostProfile, FittedCost, fit_steps, read_profile, write_profile
from eval.sim.step_samples import StepSample, step_samples
from tracing.events import PrefixCacheEvent, StepDecision, StepOutput, StepSnapshot, TraceEvent

TRUE = [6e-3, 2e-3, 1e-4, 5e-8, 3e-4, 9e-7]
"""True costs: a step, one of several tokens, a new token, a pair, a decode, a token read."""


def _profile(coefficients: list[float]) -> CostProfile:
    a, b, c, d, e, f = coefficients
    return CostProfile(
        model="tiny",
        dtype="float32",
        kv_bytes_per_token=1000,
        step_tokens=2048,
        step_s=a,
        batch_s=b,
        new_token_s=c,
        pair_s=d,
        decode_s=e,
        context_token_s=f,
        arrival_s=0.002,
        reply_s=0.001,
        copy_bytes_per_s=1e9,
        num_steps=100,
        num_kinds=20,
        median_error=0.01,
        p95_error=0.05,
        max_decodes=16,
        max_context_tokens=4000,
    )


def _works(rng: random.Random) -> list[StepWork]:
    works = []
    for batch in (0, 1, 2, 4, 8, 16):
        for context in (50, 400, 3000):
            decodes = StepWork(num_decodes=batch, decode_context_tokens=batch * context)
            works += [decodes] * (5 * (batch > 0))
            for new in (20, 150, 1000, 2000):
                works.append(
                    StepWork(
                        prefills=[(new, rng.choice((0, context)))],
                        num_decodes=batch,
                        decode_context_tokens=batch * context,
                    )
                )
    return works


def _samples(noise: float, share_disturbed: float) -> list[StepSample]:
    """Steps with the true costs and noise; a share of them also waits for another program."""
    rng = random.Random("steps")
    truth = FittedCost(_profile(TRUE))
    samples = []
    for work in _works(rng) * 4:
        seconds = truth.step_s(work) * rng.uniform(1 - noise, 1 + noise)
        disturbed = rng.random() < share_disturbed
        samples.append(StepSample(0.0, seconds + 0.3 * disturbed, work, []))
    return samples


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.1, 0.2)])
def test_a_fit_finds_the_costs(noise: float, tolerance: float) -> None:
    """The fit finds the costs exactly without noise, nearly with it."""
    fit = fit_steps(_samples(noise, share_disturbed=0.0))
    assert fit.coefficients == pytest.approx(TRUE, rel=tolerance)
    assert fit.median_error <= max(noise, 1e-6)
    assert (fit.max_decodes, fit.max_context_tokens) == (16, 5000)


def test_steps_that_were_held_up_do_not_bend_a_fit() -> None:
    """One in twenty steps waited 0.3 s for another program: each counts for at most three times its usual
    time, so steps get 10 % longer."""
    fitted = FittedCost(_profile(fit_steps(_samples(0.1, share_disturbed=0.05)).coefficients))
    truth = FittedCost(_profile(TRUE))
    for work in _works(random.Random("others")):
        assert fitted.step_s(work) == pytest.approx(1.1 * truth.step_s(work), rel=0.15)


def test_no_cost_is_negative() -> None:
    """A quantity that seems to save time gets cost zero."""
    works = [
        StepWork(prefills=[(new, 0)], num_decodes=8, decode_context_tokens=new) for new in range(8, 2000, 9)
    ]
    samples = [StepSample(0.0, 0.02 - work.decode_context_tokens * 1e-6, work, []) for work in works]
    assert min(fit_steps(samples).coefficients) >= 0


def test_too_few_kinds_of_steps_are_one_sentence() -> None:
    """Many steps of one kind do not determine the costs."""
    same = StepSample(0.0, 0.01, StepWork(num_decodes=1, decode_context_tokens=50), [])
    with pytest.raises(CostModelError, match="steps of 1 different sizes; a fit needs at least 8"):
        fit_steps([same] * 1000)


def test_a_long_prefill_takes_several_steps() -> None:
    """``prefill_s`` is the sum of the steps into which the scheduler would split it."""
    cost = FittedCost(_profile(TRUE))
    apart = [(2048, 100), (2048, 2148), (404, 4196)]
    assert cost.prefill_s(4500, 100) == pytest.approx(sum(cost.step_s(StepWork([one])) for one in apart))
    assert cost.prefill_s(0, 100) == 0.0
    assert cost.copy_s(5000) == pytest.approx(0.005)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    """A profile is read back equal, and its notes say what was measured."""
    path = tmp_path / "new" / "profile.json"
    write_profile(path, _profile(TRUE))
    cost = read_profile(path)
    assert cost.profile == _profile(TRUE)
    assert "MEASURED for tiny in float32, fitted to 100 steps" in cost.notes()[0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "Cannot read the profile"),
        (b'{"model": "tiny"', "is not a cost profile"),
        (b"\xff\xfe", "is not a cost profile"),
        (b'{"model": "tiny", "color": 1}', "is not a cost profile: Object contains unknown field `color`"),
        (msgspec.json.encode(msgspec.structs.replace(_profile(TRUE), schema_version=9)), "schema version 9"),
        (msgspec.json.encode(_profile([-1.0, *TRUE[1:]])), "step_s must be 0 or more"),
    ],
)
def test_a_bad_profile_is_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    """The error names the file and the fault."""
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CostModelError) as caught:
        read_profile(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def _snapshot(step: int, now: float, running: list[str]) -> StepSnapshot:
    return StepSnapshot(
        step=step,
        now=now,
        running=running,
        num_waiting=0,
        waiting_head=[],
        free_blocks=9,
        cached_blocks=0,
        pinned_blocks=0,
        num_pins=0,
        total_blocks=10,
        token_budget=64,
    )


def _decision(step: int, now: float, tokens: dict[str, int], preempted: list[str]) -> StepDecision:
    return StepDecision(
        step=step,
        now=now,
        new=[],
        resumed=[],
        running=[],
        preempted=preempted,
        tokens=tokens,
        total_tokens=sum(tokens.values()),
        free_blocks=9,
    )


def _hit(step: int, request_id: str, hit_tokens: int) -> PrefixCacheEvent:
    return PrefixCacheEvent(
        step=step,
        now=0.0,
        req_id=request_id,
        job_id=None,
        hit_tokens=hit_tokens,
        num_prompt_tokens=100,
        num_tokens=100,
        resumed=False,
    )


def test_steps_are_read_out_of_a_trace() -> None:
    """Cached tokens are context; a preempted request starts over; a pause does not count as a step's time."""
    events: list[TraceEvent] = [
        _snapshot(0, 1.0, []),
        _hit(0, "a", 32),
        _decision(0, 1.0, {"a": 64}, []),
        _snapshot(1, 1.5, ["a"]),
        _hit(1, "b", 0),
        _decision(1, 1.5, {"a": 4, "b": 60}, []),
        _snapshot(2, 2.0, ["a", "b"]),
        _decision(2, 2.0, {"a": 1}, ["b"]),
        _snapshot(3, 2.1, ["a"]),
        _hit(3, "b", 16),
        _decision(3, 2.1, {"b": 48}, []),
        _snapshot(4, 9.0, []),
        _decision(4, 9.0, {}, []),
    ]
    samples = list(step_samples(events))
    assert [(sample.work.prefills, sample.seconds) for sample in samples] == [
        ([(64, 32)], 0.5),
        ([(4, 96), (60, 0)], 0.5),
        ([], pytest.approx(0.1)),
        ([(48, 16)], None),
    ]
    decode = samples[2].work
    assert (decode.num_decodes, decode.decode_context_tokens) == (1, 101)


def test_drafts_are_decodes_without_a_context() -> None:
    """Drafts count as decodes without context; only accepted ones are context of the next step."""
    drafted = _decision(1, 1.5, {"a": 4}, [])
    drafted.drafts = {"a": 3}
    events: list[TraceEvent] = [
        _snapshot(0, 1.0, []),
        _hit(0, "a", 0),
        _decision(0, 1.0, {"a": 100}, []),
        StepOutput(step=0, now=1.4),
        _snapshot(1, 1.5, ["a"]),
        drafted,
        StepOutput(step=1, now=1.9, num_tokens={"a": 3}),
        _snapshot(2, 2.0, ["a"]),
        _decision(2, 2.0, {"a": 1}, []),
    ]
    _, verifying, following = (sample.work for sample in step_samples(events))
    assert (verifying.num_decodes, verifying.decode_context_tokens, verifying.prefills) == (4, 101, [])
    assert (following.num_decodes, following.decode_context_tokens) == (1, 104)
