"""The learned model of remaining work in the policy: the order it gives, and when it is dropped."""

from __future__ import annotations

import msgspec
import pytest

from continuum.learning.remaining_work import MIN_NEW_JOBS
from engine.records.lessons import ModelLearned
from estimator.learned.job_history import PLAIN_FEATURES, PastJob
from estimator.learned.models import encode_model
from estimator.learned.trees import LEAF, ModelError, Trees
from estimator.learned.work_model import WorkModel
from tests.continuum.job_room import JobRoom

PROMPT_TOKENS = PLAIN_FEATURES.index("tokens of the prompt")


def by_prompt(short: float, long: float, *, right: float = 0.9) -> ModelLearned:
    """A model that predicts the logarithm ``short`` for prompts of at most 100 tokens, else ``long``."""
    trees = Trees(
        0.0, [0], [PROMPT_TOKENS, LEAF, LEAF], [100.0, 0, 0], [1, 0, 0], [2, 0, 0], [0, short, long]
    )
    model = WorkModel(
        trees=trees, tools=[], usual=5.0, num_jobs=9, num_turns=90, right=right, right_by_age=0.5
    )
    return ModelLearned(encode_model(model).decode())


def prompt(name: int, num_tokens: int) -> list[int]:
    return [name] * num_tokens


def learn(room: JobRoom, model: ModelLearned) -> None:
    room.scheduler.signal(model, room.clock.now())


def ranks(room: JobRoom) -> list[str]:
    """The order of two waiting turns' jobs; the one with the longer prompt arrived first."""
    for name, num_tokens in (("long", 200), ("short", 50)):
        room.clock.advance(0.01)
        room.ask(f"{name}-1", prompt(len(name), num_tokens), name)
    turns = [room.policy._turns.get(room.scheduler.requests[f"{name}-1"]) for name in ("long", "short")]
    jobs = [turn.job for turn in turns if turn is not None]
    return [job.job_id for job in sorted(jobs, key=lambda job: job.rank)]


def serve_one(room: JobRoom, name: str = "first", num_tokens: int = 150) -> None:
    """Runs a job of one turn, which teaches the cost of a token of work."""
    room.turn(f"{name}-1", prompt(len(name) + 500, num_tokens), name)
    room.clock.advance(1.0)
    room.read(f"{name}-1")


def test_who_has_less_to_do_goes_first() -> None:
    """Without a model jobs are ordered by arrival, with one by its predictions."""
    room = JobRoom()
    serve_one(room)
    assert ranks(room) == ["long", "short"]
    room = JobRoom()
    serve_one(room)
    learn(room, by_prompt(short=2.0, long=9.0))
    assert ranks(room) == ["short", "long"]


def test_a_model_that_comes_while_jobs_wait_ranks_them_again() -> None:
    room = JobRoom()
    serve_one(room)
    ranks(room)
    learn(room, by_prompt(short=2.0, long=9.0))
    list(room.policy.changed_keys(room.clock.now()))
    jobs = {name: room.policy._jobs.get(name) for name in ("long", "short")}
    assert jobs["short"] is not None
    assert jobs["long"] is not None
    assert jobs["short"].rank < jobs["long"].rank


@pytest.mark.parametrize("right", [0.5, 0.4])
def test_a_model_that_is_no_better_than_age_counts_nothing(right: float) -> None:
    """A model that scored no better than age when it was trained does not change the order by age."""
    without, with_model = JobRoom(), JobRoom()
    for room in (without, with_model):
        serve_one(room)
    learn(with_model, by_prompt(short=2.0, long=9.0, right=right))
    for room in (without, with_model):
        assert ranks(room) == ["long", "short"]
    assert [room.policy._jobs.get("long").rank for room in (without, with_model)] == [  # type: ignore[union-attr]
        without.policy._jobs.get("long").rank  # type: ignore[union-attr]
    ] * 2


def test_a_model_that_is_wrong_is_believed_no_longer() -> None:
    """The model says that short prompts are much work; once ended jobs contradict it, age decides again."""
    room = JobRoom(num_blocks=600)
    learn(room, by_prompt(short=9.0, long=2.0))
    for number in range(40):
        num_turns, num_tokens = (1, 60) if number % 2 else (4, 160)
        for turn in range(num_turns):
            request_id = f"job{number}-{turn}"
            text = prompt(number + 1, num_tokens + 30 * turn)
            room.turn(request_id, text, f"job{number}")
            room.read(request_id, *(["ls"] if turn + 1 < num_turns else []))
            room.clock.advance(0.5)
    room.ask("last-1", prompt(77, 50), "last")
    last = room.policy._turns.get(room.scheduler.requests["last-1"])
    assert last is not None
    assert last.predicted_excess_s is None


def test_jobs_that_end_are_a_lesson() -> None:
    """Enough new jobs form a lesson: each turn with its tools; a job that goes on is taught again."""
    room = JobRoom(num_blocks=600)
    for number in range(MIN_NEW_JOBS):
        assert room.policy.take_lesson() is None
        room.turn(f"{number}-0", prompt(number + 1, 64), f"job{number}")
        room.read(f"{number}-0", "pytest")
        room.clock.advance(2.0)
        room.turn(f"{number}-1", [*room.said(f"{number}-0"), *prompt(5, 30)], f"job{number}")
        room.read(f"{number}-1")
    lesson = room.policy.take_lesson()
    assert lesson is not None
    jobs = msgspec.msgpack.decode(lesson(), type=list[PastJob])
    assert [len(job.turns) for job in jobs] == [2] * MIN_NEW_JOBS
    first, second = jobs[0].turns
    assert (first.num_prompt_tokens, first.num_new_tokens, first.num_output_tokens) == (64, 64, 20)
    assert (first.tools, second.tools, second.gap_s) == (("bash",), (), 2.0)
    assert second.num_prompt_tokens == 114
    assert 30 <= second.num_new_tokens <= 50
    assert room.policy.take_lesson() is None


def test_a_model_that_is_none_changes_nothing() -> None:
    """The scheduler that receives an invalid model goes on."""
    room = JobRoom()
    serve_one(room)
    with pytest.raises(ModelError):
        learn(room, ModelLearned("{}"))
    assert ranks(room) == ["long", "short"]
    assert JobRoom(learn_order=False).policy.trainer is None
