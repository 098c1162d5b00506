"""The correction of call durations: its rows, what it learns, when it is applied, and what is refused."""

from __future__ import annotations

import math
import subprocess
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.process.spawn import spawn_command, spawn_input
from estimator.durations import DurationEstimator
from estimator.learned import boosting, duration_trainer
from estimator.learned.call_history import FEATURES, LEVELS, CallFacts, CallHistory, PastCall, log_of
from estimator.learned.corrector import Corrector
from estimator.learned.duration_model import KindLoss, corrected
from estimator.learned.duration_trainer import MIN_CALLS, fit_durations
from estimator.learned.models import decode_durations, decode_model, encode_model
from estimator.learned.trainer import learned_from
from estimator.learned.trees import ModelError
from estimator.state import EstimatorStateError, restore, snapshot
from estimator.survival import NOTHING_KNOWN, SurvivalCurve
from estimator.tenants import Tenants
from estimator.tool_key import ToolKey
from tests.estimator.learned.made_calls import constant_model, made_calls, made_row
from tests.estimator.learned.made_jobs import made_jobs

CURVE = SurvivalCurve((0.0, 1.0, 2.0, 8.0), (0.0, 0.4, 0.8, 1.0), 9.0)
PYTEST, LS = ToolKey(("bash", "pytest", "unit")), ToolKey(("bash", "ls"))


def test_a_row_says_what_was_known_when_the_call_began() -> None:
    """A row has the estimator's quantiles, and recent durations of its program and of any, relative to the
    median."""
    history = CallHistory()
    history.add(PYTEST, 4.0)
    history.add(ToolKey(("bash", "pytest", "other")), 2.0)
    history.add(LS, 0.5)
    row = history.row(CURVE, PYTEST, CallFacts(3, 2, 99, 49))
    assert row is not None
    named = dict(zip(FEATURES, row, strict=True))
    assert named["ln of the 0.5 quantile"] == pytest.approx(math.log(1.251))
    assert [named[f"ln of the {level} quantile"] for level in LEVELS] == [
        log_of(CURVE.quantile(level)) for level in LEVELS
    ]
    assert named["calls of the program in the job"] == 2
    assert named["the last of them, ln beyond the median"] == pytest.approx(math.log(2.001 / 1.251))
    assert named["the longest of them, ln beyond the median"] == pytest.approx(math.log(4.001 / 1.251))
    assert named["calls in the job"] == 3
    assert named["the last of those, ln beyond the median"] == pytest.approx(math.log(0.501 / 1.251))
    assert (named["turns before this one"], named["calls in parallel"]) == (3, 2)
    assert named["ln of tokens of the prompt"] == pytest.approx(math.log(100))
    assert CallHistory().row(NOTHING_KNOWN, LS, CallFacts(0, 1, 9, 9)) is None


def test_a_quantile_in_the_unknown_tail_is_the_longest_seen() -> None:
    curve = SurvivalCurve((0.0, 1.0, 4.0, 9.0), (0.0, 0.3, 0.6, 0.6), 2.0)
    row = CallHistory().row(curve, LS, CallFacts(0, 1, 9, 9))
    assert row is not None
    assert row[len(LEVELS) - 1] == log_of(4.0)


def test_what_the_estimator_cannot_see_is_learned() -> None:
    """It learns that parallel calls take longer, leaves other calls' quantiles, and reports its loss."""
    model = fit_durations(made_calls(240))
    assert model is not None
    assert model.loss < 0.5 * model.loss_without
    assert [each.kind for each in model.kinds] == ["bash", "web"]
    alone, parallel = (model.corrections(made_row(num)) for num in (1, 3))
    assert parallel == pytest.approx([math.log(4)] * len(LEVELS), abs=0.2)
    assert alone == pytest.approx([0.0] * len(LEVELS), abs=0.2)
    assert fit_durations(made_calls(MIN_CALLS - 1)) is None


def test_where_nothing_is_to_be_learned_it_says_so() -> None:
    """Without an effect the loss does not improve; with a single group no improvement is claimed."""
    model = fit_durations(made_calls(240, effect=1.0))
    assert model is not None
    assert model.loss > 0.97 * model.loss_without
    one = [msgspec.structs.replace(call, group="one") for call in made_calls(120)]
    alone = fit_durations(one)
    assert alone is not None
    assert alone.loss == alone.loss_without


def test_of_many_calls_some_of_all_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration_trainer, "MAX_CALLS", 150)
    model = fit_durations(made_calls(240))
    assert model is not None
    assert model.num_calls == 150
    assert model.loss < model.loss_without


def test_the_arrays_answer_as_scikit_learn_does() -> None:
    """The quantile's trees give scikit-learn's predictions."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 4)).astype(np.float32).astype(np.float64)
    fitted = boosting.fit(rows, rows[:, 0] * 2, boosting.Size(20, 4, 10), 0.9)
    ours = [boosting.export(fitted).predict(row) for row in rows.tolist()]
    np.testing.assert_allclose(ours, fitted.predict(rows), rtol=1e-12)


def test_corrected_quantiles_never_cross() -> None:
    """Only the quantiles of the levels are moved."""
    curve = DurationEstimator().fit([LS] * 9, [0.5, 0.6, 0.7, 1.0, 1.5, 3.0, 5.0, 8.0, 20.0]).survival(LS)
    moved = corrected(curve, [0.5, 0.0, -0.5, 0.1, 0.2, 1.0])
    for level, correction in zip(LEVELS[2:], (-0.5, 0.1, 0.2, 1.0), strict=True):
        expected = log_of(curve.quantile(level)) + correction
        assert log_of(moved.quantile(level)) >= expected - 1e-9
    assert list(moved.edges_s) == sorted(set(moved.edges_s))
    assert list(moved.probabilities) == sorted(moved.probabilities)
    same = corrected(curve, [0.0] * len(LEVELS))
    assert [same.quantile(q / 20) for q in range(1, 20)] == pytest.approx(
        [curve.quantile(q / 20) for q in range(1, 20)]
    )


def test_it_is_believed_tool_by_tool() -> None:
    """The correction is trusted per tool: first by its training loss, then by calls that end."""
    kinds = [KindLoss("web", 0.3, 0.2)]
    corrector = Corrector(msgspec.structs.replace(constant_model(math.log(2)), kinds=kinds))
    assert corrector.correct("bash", made_row(1)).of(CURVE).quantile(0.5) == pytest.approx(2.5, rel=0.01)
    assert corrector.correct("web", made_row(1)).of(CURVE) is CURVE
    for _ in range(20):
        corrector.judge(corrector.correct("bash", made_row(1)), 0.8)
        corrector.judge(corrector.correct("web", made_row(1)), 2.5)
    assert not corrector.correct("bash", made_row(1)).is_believed
    assert corrector.correct("web", made_row(1)).is_believed
    useless = Corrector(constant_model(1.0, loss=0.2, loss_without=0.2))
    assert not useless.correct("bash", made_row(1)).is_believed


def test_the_trainer_tells_calls_from_jobs() -> None:
    """The trainer process turns calls into a correction; a model without a mark is one of remaining work."""
    lesson = msgspec.msgpack.encode(made_calls(120))
    done = subprocess.run(
        spawn_command("estimator.learned.trainer"),
        input=spawn_input(lesson),
        capture_output=True,
        check=True,
    )
    assert decode_model(done.stdout) == learned_from(lesson)
    work = learned_from(msgspec.msgpack.encode(made_jobs(8)))
    assert work is not None
    assert decode_model(encode_model(work)) == work
    assert learned_from(msgspec.msgpack.encode(list[PastCall]())) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 9}, "model of calls' durations has version 9"),
        ({"trees": []}, "no model of calls' durations"),
        ({"loss": -1.0}, "no model of calls' durations"),
        ({"roots": [7]}, "model of calls' durations is damaged: a root is no node"),
        ({"features": [len(FEATURES)]}, f"compares feature {len(FEATURES)}"),
    ],
)
def test_a_damaged_model_is_refused(change: dict[str, Any], told: str) -> None:
    """A damaged model is refused in a signal and in a state file, which otherwise preserves it."""
    model = constant_model(0.5)
    document = msgspec.json.decode(encode_model(model))
    document["trees"][3] |= {name: change.pop(name) for name in ("roots", "features") if name in change}
    damaged = {**document, **change}
    with pytest.raises(ModelError, match=told):
        decode_model(msgspec.json.encode(damaged))
    tenants = Tenants()
    tenants.duration_model = model
    state = msgspec.json.decode(snapshot(tenants))
    assert (
        restore(msgspec.json.encode(state)).duration_model == model == decode_durations(encode_model(model))
    )
    with pytest.raises(EstimatorStateError, match=r"duration|trees|loss"):
        restore(msgspec.json.encode({**state, "duration_model": damaged}))
    with pytest.raises(ModelError, match="it is no model"):
        decode_model("[")
