"""Requests of two tenants that do not fit side by side do not preempt each other for ever."""

from __future__ import annotations

import pytest

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext
from engine.records.messages import JobRef
from tests.core.engine_room import EngineRoom

BLOCK = 3
GAMES = [
    (20, 32, "few 17 1, few 29 1, few 17 2, few 22 0, many 39 2, many 35 0"),
    (20, 32, "many 37 0, many 33 1, many 20 1, few 43 2, many 44 1, many 24 2"),
    (18, 16, "many 22 1, few 22 2, many 32 2, few 23 2, few 15 1, many 29 0"),
    (16, 16, "few 39 1, many 18 2, many 23 2, few 25 1, many 15 1"),
]
"""Blocks of the pool, tokens of a step, and requests: tenant, prompt tokens, steps before the next one."""


@pytest.mark.parametrize(("num_blocks", "most_tokens", "requests"), GAMES)
def test_all_requests_end(num_blocks: int, most_tokens: int, requests: str) -> None:
    """Prompts take several steps and most of the pool, nothing that was preempted is cached, and all requests
    are overdue. A tenant with fewer slots may preempt the other one, whose growth preempts it in turn."""
    policy = ContinuumPolicy(PolicyContext(BLOCK, num_blocks - 1), ContinuumConfig(max_wait_s=1.0))
    room = EngineRoom(
        policy,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_model_len=60,
        enable_prefix_caching=False,
        max_num_seqs=4,
        max_num_batched_tokens=most_tokens,
        long_prefill_token_threshold=5,
    )
    for number, request in enumerate(requests.split(", ")):
        tenant, num_tokens, num_steps = request.split()
        name = f"{tenant}{number}"
        room.add(name, [number + 1] * int(num_tokens), max_tokens=4, job=JobRef(name, tenant=tenant))
        for _ in range(int(num_steps)):
            room.step()
    room.clock.advance(10)
    room.run()
    assert len(room.finished) == len(requests.split(", "))
