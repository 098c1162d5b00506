"""A model of remaining work: rows from turns, scikit-learn's trees evaluated without it, and what is
refused."""

from __future__ import annotations

import random
import subprocess
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.process.spawn import spawn_command, spawn_input
from estimator.learned import boosting, work_trainer
from estimator.learned.concordance import Concordance
from estimator.learned.job_history import (
    MAX_TURNS,
    PLAIN_FEATURES,
    JobHistory,
    PastJob,
    TurnFacts,
    remaining_work,
    rows_of,
)
from estimator.learned.models import decode_model, encode_model
from estimator.learned.trees import LEAF, ModelError, Trees
from estimator.learned.work_trainer import fit_work
from estimator.state import EstimatorStateError, restore, snapshot
from estimator.tenants import Tenants
from tests.estimator.learned.made_jobs import LONG, SHORT, made_job, made_jobs


def test_a_row_says_what_was_known_when_the_turn_began() -> None:
    """A row has nothing of the turn's own answer; tools are counted by the vocabulary."""
    job = PastJob(
        "g",
        (
            TurnFacts(1000, 1000, 50, 0.0, ("Bash", "Bash")),
            TurnFacts(1250, 200, 150, 3.0, ("Read",)),
            TurnFacts(1500, 100, 10, 4.0),
        ),
    )
    rows = [
        dict(zip((*PLAIN_FEATURES, "Bash", "Web"), row, strict=True)) for row in rows_of(job, ["Bash", "Web"])
    ]
    assert rows[0]["work before this one"] == 0
    assert rows[0]["tokens of the first prompt"] == rows[0]["tokens of the prompt"] == 1000
    assert rows[2] == {
        "turns before this one": 2.0,
        "work before this one": 1000 / 40 + 50 + 200 / 40 + 150,
        "tokens of the prompt": 1500.0,
        "tokens of the first prompt": 1000.0,
        "new tokens of the prompt": 100.0,
        "generated tokens of the last turns, mean": 100.0,
        "new tokens of the last prompts, mean": 600.0,
        "seconds in tools": 7.0,
        "number of different tools": 2.0,
        "share of the commonest tool": 2 / 3,
        "Bash": 2.0,
        "Web": 0.0,
    }
    assert remaining_work(job) == pytest.approx([242.5, 167.5, 12.5])


def test_tools_that_are_told_late_are_the_same_as_tools_told_at_once() -> None:
    """Calls reported after a turn's end give the same rows as calls reported with it."""
    late = JobHistory()
    for turn in made_job(3, LONG).turns:
        late.add(msgspec.structs.replace(turn, tools=()))
        late.called(turn.tools)
    at_once = JobHistory()
    for turn in made_job(3, LONG).turns:
        at_once.add(turn)
    assert late.turns == at_once.turns
    assert late.row(9, 9, 1.0, [LONG]) == at_once.row(9, 9, 1.0, [LONG])


def test_a_job_of_more_turns_than_are_remembered_has_all_its_work() -> None:
    """Calls of a later turn are not added to the last remembered turn."""
    history = JobHistory()
    for number in range(MAX_TURNS + 3):
        history.add(TurnFacts(100, 40, 9))
        history.called([f"tool{number}"])
    assert history.turns[-1].tools == (f"tool{MAX_TURNS - 1}",)
    assert history.row(1, 1, 0.0, [f"tool{MAX_TURNS + 2}"])[-1] == 1
    remaining = remaining_work(PastJob("g", tuple(history.turns), history.later_work))
    assert remaining[0] == pytest.approx(10.0 * (MAX_TURNS + 3)) == pytest.approx(history.work)
    assert remaining[-1] == pytest.approx(40.0)


def test_the_arrays_answer_as_scikit_learn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions equal scikit-learn's on training rows and others; its trees compare in single precision."""
    fitted: list[Any] = []
    export = boosting.export

    def keep(model: Any) -> Trees:
        fitted.append(model)
        return export(model)

    monkeypatch.setattr(work_trainer, "export", keep)
    jobs = made_jobs(12)
    model = fit_work(jobs)
    assert model is not None
    rng = random.Random(0)
    known = [row for job in jobs for row in rows_of(job, model.tools)]
    others = [[float(rng.randint(0, 3000)) for _ in row] for row in known]
    for rows in (known, others):
        single = np.array(rows, np.float32)
        ours = [model.trees.predict(row) for row in single.tolist()]
        np.testing.assert_allclose(ours, fitted[-1].predict(single), rtol=1e-12)


def test_what_tools_predict_is_learned() -> None:
    """The effect of tools holds for unseen jobs; a model without an effect reports that about itself."""
    model = fit_work(made_jobs(15))
    assert model is not None
    assert model.right > 0.75 > model.right_by_age
    new = {tool: rows_of(made_job(99, tool), model.tools)[2] for tool in (LONG, SHORT)}
    assert model.trees.predict(new[LONG]) > model.trees.predict(new[SHORT]) + 1
    assert fit_work(made_jobs(3)) is None  # There are too few.


def test_the_trainer_is_a_process_of_its_own() -> None:
    """The trainer process turns lessons into a model, too few jobs into none; a failure gives a non-zero exit
    code."""

    def asked(lesson: bytes) -> subprocess.CompletedProcess[bytes]:
        command = spawn_command("estimator.learned.trainer")
        return subprocess.run(command, input=spawn_input(lesson), capture_output=True, check=False)

    assert decode_model(asked(msgspec.msgpack.encode(made_jobs(8))).stdout) == fit_work(made_jobs(8))
    few = asked(msgspec.msgpack.encode(made_jobs(2)))
    assert (few.returncode, few.stdout) == (0, b"")
    assert asked(b"no").returncode != 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 9}, "has version 9"),
        ({"tools": ["x"] * 65}, "no model"),
        ({"usual": 1e9}, "no model"),
        ({"trees": {"roots": [10**6]}}, "a root is no node"),
        ({"trees": {"left": [0] * 10}}, "not of one length"),
        ({"trees": {"features": 99}}, "compares feature 99"),
        ({"trees": {"left": 0}}, "does not come after it"),
    ],
)
def test_a_damaged_model_is_refused(change: dict[str, Any], told: str) -> None:
    """A damaged model is refused before use: evaluation never leaves the arrays or loops. A state file with
    one gives a one-sentence error."""
    model = fit_work(made_jobs(8))
    assert model is not None
    document = msgspec.json.decode(encode_model(model))
    first = document["trees"]["features"].index(next(f for f in document["trees"]["features"] if f != LEAF))
    for name, value in change.pop("trees", {}).items():
        if isinstance(value, list):
            document["trees"][name] = value
        else:
            document["trees"][name][first] = value
    damaged = msgspec.json.encode({**document, **change})
    with pytest.raises(ModelError, match=told):
        decode_model(damaged)
    tenants = Tenants()
    tenants.work_model = model
    state = msgspec.json.decode(snapshot(tenants))
    assert restore(msgspec.json.encode(state)).work_model == model
    with pytest.raises(EstimatorStateError):
        restore(msgspec.json.encode({**state, "work_model": {**document, **change}}))


def test_pairs_are_counted_beside_those_of_age() -> None:
    """A tie counts as half right; equal pairs count for nothing; older pairs fade."""
    judged = Concordance(10, 0.8, 0.4)
    assert (judged.right, judged.right_by_age) == pytest.approx((0.8, 0.4))
    judged.fade(0.5)
    judged.add(1.0, 0.0, 2.0)
    judged.add(1.0, 1.0, 0.0)
    assert judged.num_pairs == 6
    assert judged.num_right == pytest.approx(5.0)
    assert judged.num_right_by_age == pytest.approx(2.5)
    assert Concordance().right == 0.5
