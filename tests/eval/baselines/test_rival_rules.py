"""Evictions and pauses of other servers: numbers worked out by hand from their rules, on the real scheduler.

Blocks are of 4 tokens, a step takes 10 ms and 32 tokens.
"""

from __future__ import annotations

import pytest

from tests.eval.baselines.policy_room import PolicyRoom

# ---- tlru ----


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("policy", "num_new", "cached"),
    [
        ("fcfs", 32, (16, 40)),  # six blocks are lacking: the last ones of the conversation that is older
        ("tlru:16", 32, (28, 28)),  # 41 - 16 tokens are seven blocks: three of each conversation go first
        ("tlru:16", 36, (24, 28)),  # a seventh block by LRU
        ("tlru:24", 32, (20, 36)),  # 41 - 24 tokens are five blocks; of those behind them the older ones go
        ("tlru:100", 32, (16, 40)),  # nothing must be cached: the older conversation goes, as by LRU
        ("tlru:0", 32, (16, 40)),  # all must be: as by LRU
    ],
)
def test_tlru_evicts_first_what_may_be_computed_again(
    policy: str, num_new: int, cached: tuple[int, int], async_scheduling: bool
) -> None:
    """Of two conversations of 41 tokens, ten full blocks each, in a pool of 22: a third one comes."""
    found = []
    for job in ("older", "newer"):
        room = PolicyRoom(policy, num_blocks=22, async_scheduling=async_scheduling)
        room.play("older", 40, "ls")
        room.play("newer", 40, "ls")
        room.play("third", num_new, "ls")
        room.play(job, 2, "ls")
        found.append(room.finished[f"{job}2"].num_cached_tokens)
    assert tuple(found) == cached


def test_tlru_keeps_a_conversation_that_went_on() -> None:
    """The tenth block was the end of its first turn and is in the middle of the second: of three blocks that
    are lacking, none is that one."""
    room = PolicyRoom("tlru:8", num_blocks=24)
    room.play("long", 40, "ls")
    room.play("long", 40, "ls")
    room.play("other", 28, "ls")
    room.play("long", 4, "ls")
    assert room.finished["long3"].num_cached_tokens == 68
