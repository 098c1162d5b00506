"""Promises about turns that the core keeps for continuation: tokens and hashes equal those of the whole
prompt."""

from __future__ import annotations

import pytest

from engine.core.kv_cache.block_hash import BlockHasher
from engine.core.request import Request, RequestStatus
from engine.core_process.kept_turns import KeptTurns
from engine.records.messages import TurnPrefix
from engine.records.sampling_params import SamplingParams

SIZE = 4
HASHER = BlockHasher(SIZE)


def ended(
    name: str,
    tokens: list[int],
    output: list[int],
    turns: KeptTurns,
    *,
    continues: TurnPrefix | None = None,
    status: RequestStatus = RequestStatus.FINISHED_STOPPED,
    keeps: bool = True,
    salt: str | None = None,
) -> Request:
    """A request that has ended with this output."""
    before = None
    if continues is not None:
        before = turns.take(continues)
        assert before is not None
    request = Request(
        name,
        tokens,
        SamplingParams(max_tokens=100),
        0.0,
        block_hasher=HASHER,
        before=before,
        keeps_tokens=keeps,
        cache_salt=salt,
    )
    for token in output:
        request.append_output_token(token)
    request.status = status
    turns.request_ended(request, 1.0)
    return request


def whole(tokens: list[int], salt: str | None = None) -> Request:
    params = SamplingParams(max_tokens=100)
    return Request("whole", tokens, params, 0.0, block_hasher=HASHER, cache_salt=salt)


@pytest.mark.parametrize("num_known", [5, 8, 9, 11])
def test_a_continued_request_is_that_of_all_tokens(num_known: int) -> None:
    """A request may continue any part of a turn, e.g. if a stop string cut off some of the reply."""
    turns = KeptTurns(100, SIZE)
    first = ended("a", list(range(5)), list(range(10, 16)), turns)
    assert first.num_tokens == 11
    tokens = [*range(5), *range(10, 16)][:num_known]
    second = ended("b", [50, 51], [], turns, continues=TurnPrefix("a", num_known))
    expected = whole([*tokens, 50, 51])
    assert second.all_token_ids == expected.all_token_ids
    assert second.block_hashes == expected.block_hashes
    assert second.num_prompt_tokens == expected.num_prompt_tokens
    assert second.continues == TurnPrefix("a", num_known)


def test_another_salt_has_hashes_of_its_own() -> None:
    """With another salt all hashes differ, from the first block on."""
    turns = KeptTurns(100, SIZE)
    ended("a", list(range(8)), [9], turns, salt="mine")
    second = ended("b", [50], [], turns, continues=TurnPrefix("a", 9), salt="other")
    assert second.block_hashes == whole([*range(8), 9, 50], "other").block_hashes


def test_a_turn_is_given_to_one() -> None:
    """A turn's lists grow with the request that continues it. If that is aborted, the turn is available
    again."""
    turns = KeptTurns(100, SIZE)
    ended("a", list(range(8)), [9], turns)
    second = ended(
        "b", [50], [60, 61], turns, continues=TurnPrefix("a", 9), status=RequestStatus.FINISHED_ABORTED
    )
    assert second.output_token_ids == [60, 61]
    assert turns.num_tokens == 9
    third = ended("c", [70], [80], turns, continues=TurnPrefix("a", 9))
    assert third.all_token_ids == [*range(8), 9, 70, 80]
    assert third.block_hashes == whole([*range(8), 9, 70, 80]).block_hashes
    assert turns.take(TurnPrefix("a", 9)) is None
    assert turns.take(TurnPrefix("c", 11)) is not None
    counts = turns.take_counts()
    assert counts is not None
    assert (counts.num_known, counts.num_forgotten) == (3, 1)
    assert turns.take_counts() is None


def test_only_what_is_asked_for_is_kept() -> None:
    """A turn is kept if its client may continue it and it ended normally; more tokens than it has are
    unknown."""
    turns = KeptTurns(100, SIZE)
    ended("a", [1, 2], [3], turns, keeps=False)
    ended("b", [1, 2], [3], turns, status=RequestStatus.FINISHED_ERROR)
    ended("c", [1, 2], [3], turns)
    assert len(turns) == 1
    assert turns.take(TurnPrefix("c", 4)) is None
    assert turns.take(TurnPrefix("c", 3)) is not None


def test_another_turn_is_not_continued() -> None:
    """A continuation names the last tokens of its turn, so another turn is never taken for it."""
    turns = KeptTurns(100, SIZE)
    ended("a", [1, 2, 3], [4, 5], turns)
    assert turns.take(TurnPrefix("a", 4, [3, 5])) is None
    assert turns.take(TurnPrefix("a", 6, [5, 6])) is None
    known = turns.take(TurnPrefix("a", 4, [3, 4]))
    assert known is not None
    assert known.token_ids == [1, 2, 3, 4]


def test_the_oldest_are_forgotten() -> None:
    """The oldest turns are forgotten; the bound is on tokens, not on turns."""
    turns = KeptTurns(10, SIZE)
    for name in "abc":
        ended(name, [1, 2, 3], [4], turns)
    assert (len(turns), turns.num_tokens) == (2, 8)
    assert turns.take(TurnPrefix("a", 4)) is None
    ended("long", list(range(11)), [1], turns)
    assert (len(turns), turns.num_tokens) == (0, 0)
