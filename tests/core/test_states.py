"""A model with full attention and layers with states: where checkpoints are taken, where later prompts
continue, and what a pin holds. Blocks have 4 tokens, and a state counts as 10 blocks."""

from __future__ import annotations

import pytest

from engine.core.policy import PinEnd, PolicyContext, StalePrefix
from engine.records.kv_cache_groups import KVCacheGroup
from tests.core.engine_room import EngineRoom
from tests.core.test_windows import PinningPolicy
from tracing.events import PrefixCacheEvent, TraceEvent
from tracing.tracer import Tracer


class Seen:
    """Records the events of a trace."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)


GROUPS = (KVCacheGroup((0,)), KVCacheGroup((0, 1, 2), state_blocks=10))


def room_of(policy: PinningPolicy | None = None, **options: object) -> EngineRoom:
    options = {"num_blocks": 65, "kv_cache_groups": GROUPS, "num_states": 17} | options
    return EngineRoom(policy, **options)  # type: ignore[arg-type]


def cached_tokens(room: EngineRoom, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Runs a prompt to its end; returns how many of its tokens were cached."""
    request = room.add(name, prompt, max_tokens=max_tokens)
    room.run()
    room.check_invariants()
    assert request.num_cached_tokens is not None
    return request.num_cached_tokens


def free_states(room: EngineRoom) -> int:
    states = room.scheduler.kv.states
    assert states is not None
    return states.pool.num_free_blocks


def test_a_prefill_is_split_behind_the_last_full_block() -> None:
    """The second to last step ends where a state is worth keeping: after 28 of 31 tokens."""
    room = room_of(max_num_batched_tokens=14)
    room.add("a", list(range(31)), max_tokens=2)
    steps = [room.step().num_scheduled_tokens["a"] for _ in range(4)]
    assert steps == [12, 12, 4, 3]
    room.run()


def test_a_step_reads_one_slot_and_writes_another() -> None:
    """The first step reads no slot; one that would overwrite a checkpoint gets another slot."""
    room = room_of()
    room.add("a", list(range(10)), max_tokens=4)
    slots = []
    for _ in range(5):
        plan = room.step()
        slots.append(plan.state_slots["a"])
    (first, *others), last = slots, slots[-1]
    assert first[0] == 0, "nothing was computed before"
    assert others[0] == (first[1], others[0][1])
    assert others[0][0] != others[0][1], "the state behind 8 tokens is a checkpoint"
    assert others[1] == (others[0][1], others[0][1]), "nothing is kept at 10 tokens"
    assert last[0] != last[1], "the state behind 12 is one"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_next_turn_goes_on_behind_the_output(async_scheduling: bool) -> None:
    """With 18 tokens of prompt and 9 of output, the last never computed, 6 full blocks are cached."""
    room = room_of(async_scheduling=async_scheduling)
    cached_tokens(room, "a", list(range(18)), max_tokens=9)
    assert cached_tokens(room, "b", [*room.tokens["a"], 1, 2, 3]) == 24


def test_a_next_turn_that_leaves_the_output_goes_on_behind_the_prompt() -> None:
    """A turn without the previous output, as when reasoning is stripped, continues after the prompt."""
    room = room_of()
    cached_tokens(room, "a", list(range(18)), max_tokens=9)
    assert cached_tokens(room, "b", [*range(18), 77, 78, 79]) == 16


def test_prompts_that_share_a_beginning_find_it_from_the_third_on() -> None:
    """The first prompt cannot know where others diverge; the second one does, and takes a checkpoint there
    (vLLM #45238: 0 of 64 hits if the only checkpoint is in tokens of one prompt)."""
    room = room_of()
    shared = list(range(15))
    assert cached_tokens(room, "a", [*shared, *[1] * 9]) == 0
    assert cached_tokens(room, "b", [*shared, *[2] * 9]) == 0
    assert cached_tokens(room, "c", [*shared, *[3] * 9]) == 12
    assert cached_tokens(room, "d", [*shared, *[4] * 9]) == 12


def test_what_is_computed_for_want_of_a_state_is_told() -> None:
    """The second prompt shares 12 tokens with cached KV but without a state, and this is reported."""
    seen = Seen()
    room = room_of(tracer=Tracer(seen))
    shared = list(range(15))
    cached_tokens(room, "a", [*shared, *[1] * 9])
    cached_tokens(room, "b", [*shared, *[2] * 9])
    hits = [event for event in seen.events if isinstance(event, PrefixCacheEvent)]
    assert [event.without_state_tokens for event in hits] == [0, 12]
    assert room.scheduler.make_stats().tokens_without_state == 12


def test_a_short_prompt_is_hit() -> None:
    """States have a separate pool, so blocks stay small (in vLLM #51198 they make blocks of 528)."""
    room = room_of()
    assert cached_tokens(room, "a", list(range(6))) == 0
    assert cached_tokens(room, "b", list(range(6))) == 4


def test_what_a_step_writes_is_not_hit_in_the_same_step() -> None:
    """All sequences of a step read their states before any is written."""
    room = room_of()
    room.add("a", list(range(12)), max_tokens=1)
    second = room.add("b", list(range(12)), max_tokens=1)
    room.step()
    assert second.num_cached_tokens == 0
    room.run()
    room.check_invariants()


def test_a_hit_needs_the_blocks_and_the_state() -> None:
    """Cached blocks without a state are recomputed."""
    room = room_of(num_states=6)
    cached_tokens(room, "a", list(range(16)))
    for other in range(6):  # Their states evict those of "a".
        cached_tokens(room, f"o{other}", [100 + other] * 9)
    hit, num_tokens = room.scheduler.kv.get_computed_blocks(room.add("b", [*range(16), 5, 6]))
    assert (hit, num_tokens) == ([], 0)
    room.run()


def test_states_that_a_job_has_passed_are_evicted_first() -> None:
    """A job of many turns keeps only its last states, so that an idle job keeps its own (SGLang's cap of
    states per path)."""
    room = room_of(num_states=12)
    cached_tokens(room, "idle", list(range(50, 60)), max_tokens=4)
    idle = room.tokens["idle"]
    history = list(range(9))
    for turn in range(6):
        cached_tokens(room, f"t{turn}", history, max_tokens=6)
        history = [*room.tokens[f"t{turn}"], 7]
        assert len(history) < 60
    assert cached_tokens(room, "back", [*idle, 1, 2]) == 12


def test_a_shared_beginning_outlives_the_jobs_that_passed_it() -> None:
    """A fork that is hit often is not evicted early because one job continued after it."""
    room = room_of(num_states=12)
    shared = list(range(12))
    for job in range(3):
        cached_tokens(room, f"first{job}", [*shared, 30 + job, *[60 + job] * 8], max_tokens=2)
    for job in range(6):
        assert cached_tokens(room, f"later{job}", [*shared, 40 + job, *[80 + job] * 8], max_tokens=2) == 12


def test_a_request_waits_for_a_state() -> None:
    """States are counted at admission; blocks are not short here."""
    room = room_of(num_states=5, max_num_seqs=8)
    for name in "abc":
        room.add(name, [ord(name)] * 6, max_tokens=3)
    room.step()
    assert len(room.scheduler.running) == 2
    assert room.scheduler.kv.num_free_blocks > 40
    room.run()
    assert set(room.finished) == {"a", "b", "c"}
    assert free_states(room) == 4


def test_without_a_free_slot_no_checkpoint_is_taken() -> None:
    """The requests continue in place, with the same tokens."""
    room = room_of(num_states=5)
    for name in "ab":
        room.add(name, [ord(name)] * 9, max_tokens=12)
    room.run()
    room.check_invariants()
    assert all(len(room.received[name]) == 12 for name in "ab")


def test_a_preempted_request_goes_on_from_its_last_checkpoint() -> None:
    room = room_of(num_blocks=13, max_model_len=40)
    first = room.add("a", list(range(17)), max_tokens=14)
    second = room.add("b", list(range(100, 117)), max_tokens=14)
    resumed = []
    while room.scheduler.has_unfinished_requests():
        plan = room.step()
        cached = plan.scheduled_cached_reqs
        resumed += [
            num
            for i, num in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if i in cached.resumed_req_ids
        ]
        room.check_invariants()
    assert first.num_preemptions + second.num_preemptions > 0
    assert max(resumed) >= 16


# ---- pins ----


def test_a_pin_holds_one_state_and_counts_its_bytes() -> None:
    policy = PinningPolicy()
    room = room_of(policy)
    cached_tokens(room, "a", list(range(18)), max_tokens=9)
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (6, 16)
    assert room.scheduler.kv.num_pinned_blocks == 16
    assert free_states(room) == 15
    context = PolicyContext(4, 64, kv_cache_groups=GROUPS, num_states=16)
    assert context.blocks_of_pin(6) == pin.num_blocks
    assert (context.blocks_for(6), context.num_countable_blocks) == (6, 224)
    for other in range(6):
        cached_tokens(room, f"o{other}", [100 + other] * 20)
    assert cached_tokens(room, "b", [*room.tokens["a"], 1, 2, 3]) == 24


def test_a_pin_gives_its_state_to_a_request_that_lacks_one() -> None:
    """The pin ends whole, as its blocks are useless without its state."""
    policy = PinningPolicy()
    room = room_of(policy, num_states=4)
    cached_tokens(room, "a", list(range(9)), max_tokens=4)
    cached_tokens(room, "b", list(range(50, 59)), max_tokens=4)
    cached_tokens(room, "c", list(range(70, 79)), max_tokens=4)
    assert len(policy.pins()) == 2, "one pin was revoked"
    assert room.scheduler.kv.num_pinned_blocks == sum(pin.num_blocks for pin in policy.pins())


def test_a_pin_without_the_last_state_is_cut_to_where_a_return_hits() -> None:
    """No slot was free for the state after the output, so the pin holds only the state after the prompt."""
    policy = PinningPolicy()
    room = room_of(policy, num_states=4)
    room.add("a", list(range(9)), max_tokens=12)
    states = room.scheduler.kv.states
    assert states is not None
    room.step()
    taken = states.pool.get_new_blocks(states.pool.num_free_blocks)
    while room.scheduler.has_unfinished_requests():
        room.step()
    states.pool.free_blocks(taken)
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (2, 12)
    assert policy.lost == [(3, PinEnd.REVOKED)]
    assert cached_tokens(room, "b", [*range(9), 5, 6, 7]) == 8


def test_a_pin_whose_tail_is_superseded_holds_an_earlier_state() -> None:
    """The next prompt leaves out the reasoning of the last answer."""
    policy = PinningPolicy()
    room = room_of(policy)
    cached_tokens(room, "a", list(range(18)), max_tokens=9)
    (pin,) = policy.pins()
    policy.stale.append(StalePrefix(pin.block_hashes[5:], 5, pin, "b"))
    room.scheduler.expire(room.clock.now())
    assert (pin.num_prefix_blocks, pin.num_blocks) == (4, 14)
    assert policy.lost == [(2, PinEnd.SUPERSEDED)]
    room.check_invariants()
    assert cached_tokens(room, "b", [*range(18), 5, 6, 7]) == 16


def test_at_100k_tokens_a_pin_of_a_hybrid_takes_a_quarter() -> None:
    """With Qwen3-Next's layers, 12 of 48 attend, with 2 heads of 256 in bf16; a state has 36 layers of 32
    heads of 128 x 128 in fp32 and their convolutions' last inputs."""
    size, num_tokens = 16, 100_000
    block_bytes = 12 * size * 2 * 2 * 256 * 2
    state_bytes = 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    groups = (KVCacheGroup(tuple(range(12))), KVCacheGroup((), state_blocks=-(-state_bytes // block_bytes)))
    all_attend = num_tokens // size * 4
    held = PolicyContext(size, 1, kv_cache_groups=groups).blocks_of_pin(num_tokens // size)
    assert 0.25 < held / all_attend < 0.27
