"""Each baseline decides as published: numbers computed by hand from its formula, on the real scheduler.

Blocks have 4 tokens, a step takes 10 ms, and a prefill 0.1 s per token, as in the profile.
"""

from __future__ import annotations

import math

import pytest

from continuum.jobs.job import BranchTip, Job
from engine.core.request import RequestStatus
from engine.records.block_chain import BlockChain
from eval.baselines.infercept import InferceptPolicy
from tests.eval.baselines.policy_room import PlainKnowledge, PolicyRoom


def keep_busy(room: PolicyRoom, num_requests: int = 1, max_tokens: int = 100) -> None:
    """Adds requests without a job that run for long."""
    for number in range(num_requests):
        room.add(f"busy{number}", [900 + number] * 4, max_tokens=max_tokens)
        room.step()


def gap(room: PolicyRoom, job: str, seconds: float, command: str) -> None:
    """Runs one gap of the job: a turn that calls ``command``, then waits before the next turn."""
    room.play(job, 4, command)
    room.wait(seconds)


# ---- program-fcfs ----


def test_program_fcfs_orders_by_the_first_arrival_of_the_program() -> None:
    """A returning turn of an older program goes before a program that began in between; nothing is pinned."""
    room = PolicyRoom("program-fcfs", max_num_seqs=1)
    room.play("old", 8, "ls")
    room.wait(1)
    keep_busy(room, max_tokens=3)
    room.send("young", 8)
    room.wait(1)
    room.send("old", 8)
    assert room.num_pins == 0
    assert room.starts(2) == ["old2", "young1"]


def test_program_fcfs_preempts_the_youngest_program() -> None:
    """The program that arrived last is preempted, whichever turn was admitted last."""
    room = PolicyRoom("program-fcfs", num_blocks=12)
    room.play("old", 4, "ls")
    room.wait(1)
    room.send("young", 16, max_tokens=20)
    room.step()
    room.send("old", 12, max_tokens=20)
    room.run()
    assert room.finished["young1"].num_preemptions == 1
    assert room.finished["old2"].num_preemptions == 0


# ---- fixed-ttl ----


@pytest.mark.parametrize("seconds", [0.5, 2, 60])
def test_fixed_ttl_holds_every_turn_that_is_not_the_last_for_so_long(seconds: float) -> None:
    """Every turn but the last is pinned for the fixed time, whatever its tool."""
    room = PolicyRoom(f"fixed-ttl:{seconds}")
    room.play("a", 20, "sleep 1000")
    assert room.held_until_s == pytest.approx(seconds)
    room.wait(seconds - 0.01)
    assert room.num_pins == 1
    room.wait(0.02)
    assert room.num_pins == 0
    room.play("b", 20, is_last_step=True)
    assert room.num_pins == 0


def test_fixed_ttl_keeps_a_pin_whose_turn_is_back() -> None:
    """An expired pin stays until the waiting turn has taken it over."""
    room = PolicyRoom("fixed-ttl:2", max_num_seqs=1)
    room.play("a", 20, "ls")
    keep_busy(room)
    room.send("a", 4)
    room.wait(60)
    assert room.num_pins == 1
    room.run()
    assert room.finished["a2"].num_cached_tokens == 20


def test_fixed_ttl_lets_nobody_break_a_pin_but_an_engine_that_stands_still() -> None:
    """While something runs a new job waits, however long; when nothing runs, the pin is broken at once."""
    room = PolicyRoom("fixed-ttl:1000", num_blocks=16)
    room.play("a", 40, "ls")
    keep_busy(room, max_tokens=12)
    room.send("new", 40)
    room.wait(900)
    room.step()
    assert room.pinned_jobs == ["a"]
    room.run()
    assert room.num_pins == 1  # The pin is the new job's.
    assert room.pinned_jobs == ["new"]


def test_fixed_ttl_orders_preempted_then_warm_then_program_age() -> None:
    """The order has the three keys of the Continuum paper, section 4.3."""
    room = PolicyRoom("fixed-ttl:5", max_num_seqs=1)
    room.play("old", 8, "ls")
    room.wait(6)
    room.play("warm", 8, "ls")
    keep_busy(room, max_tokens=3)
    room.send("new", 8)
    room.send("old", 4)
    room.send("warm", 4)
    assert room.starts(3) == ["warm2", "old2", "new1"]


# ---- fork ----


by_either_name = pytest.mark.parametrize("fork", ["fork", "continuum:ttl_rule=fork"])
"""The rule decides the same as a separate policy and as a rule of ours."""


@by_either_name
def test_fork_pins_two_seconds_up_to_a_mean_of_two_seconds(fork: str) -> None:
    """A new tool: 2 s. Gaps of 1 and 2.9 s: mean 1.95, 2 s. A third of 4.1 s: mean 2.67, no pin."""
    room = PolicyRoom(fork)
    held = []
    for seconds in (1.0, 2.9, 4.1, 1.0):
        room.play("a", 4, "pytest -q")
        held.append(room.held_until_s)
        # The gap runs from the end of the turn to the next arrival.
        room.wait(seconds)
    assert held[:3] == [pytest.approx(2.0)] * 3
    assert held[3] is None


@by_either_name
def test_fork_lends_a_tool_nothing_of_others(fork: str) -> None:
    """After ten slow calls of another tool a quick one is pinned by its own mean."""
    room = PolicyRoom(fork)
    for number in range(10):
        for job, seconds, command in (("quick", 0.1, "ls"), ("slow", 90.0, "make all")):
            gap(room, f"{job}{number}", seconds, command)
            room.play(f"{job}{number}", 4, is_last_step=True)
    room.play("a", 4, "ls")
    assert room.held_until_s == pytest.approx(2.0)


@by_either_name
def test_fork_takes_the_first_word_for_the_tool(fork: str) -> None:
    """After slow gaps of ``cd x && make`` a quick ``cd y && ls`` is not pinned either."""
    room = PolicyRoom(fork)
    gap(room, "a", 60.0, "cd x && make")
    room.play("a", 4, "cd y && ls")
    assert room.num_pins == 0
    room.wait(60)
    room.play("a", 4, "ls")
    assert room.num_pins == 1


@by_either_name
@pytest.mark.parametrize("commands", [(), ("ls", "pwd")])
def test_fork_pins_nothing_without_exactly_one_call(commands: tuple[str, ...], fork: str) -> None:
    """The published pattern matches one block or none."""
    room = PolicyRoom(fork)
    room.play("a", 4, *commands)
    assert room.num_pins == 0


def test_fork_queues_pinned_jobs_first_and_preempted_ones_by_age() -> None:
    """Of two cold turns the older job's goes first, although the younger one was preempted."""
    room = PolicyRoom("fork", num_blocks=10)
    room.play("old", 4, "ls")
    room.wait(3)
    room.add("filler", [1] * 4, max_tokens=22)
    room.send("young", 12, max_tokens=20)
    room.step()
    while "young1" in room.scheduler.requests and not room.scheduler.requests["young1"].num_preemptions:
        room.step()
    preempted = room.scheduler.requests["young1"]
    back = room.scheduler.requests[room.send("old", 4)]
    key = room.scheduler.policy.waiting_key
    now = room.clock.now()
    assert key(back, now) < key(preempted, now)


def test_fork_preempts_the_latest_job_rather_than_touch_a_pin() -> None:
    """With two or more running, the latest job without a last-step flag is preempted, pins are kept."""
    for flagged, victim in ((False, "c1"), (True, "b1")):
        room = PolicyRoom("fork", num_blocks=14)
        room.play("held", 16, "ls")
        room.send("b", 8, max_tokens=40)
        room.step()
        room.send("c", 8, max_tokens=40, is_last_step=flagged)
        room.run_for(14)
        preempted = [r for r in room.scheduler.requests.values() if r.num_preemptions]
        assert [r.request_id for r in preempted] == [victim]
        assert room.pinned_jobs == ["held"]


def test_fork_drops_the_pin_that_ends_last_when_at_most_one_runs() -> None:
    """A turn that grows alone takes the whole pin with the latest end, and no other."""
    room = PolicyRoom("fork", num_blocks=14)
    room.play("first", 16, "ls")
    room.wait(0.5)
    room.play("second", 16, "ls")
    room.add("grows", [1] * 16, max_tokens=20)
    room.run_for(12)
    assert room.pinned_jobs == ["first"]
    assert not room.scheduler.requests["grows"].num_preemptions


def test_fork_drops_a_pin_for_the_head_of_the_queue_only_when_nothing_runs() -> None:
    """While anything runs, a job that does not fit waits for pins to end."""
    room = PolicyRoom("fork", num_blocks=14)
    room.play("held", 32, "ls")
    room.add("busy", [1] * 8, max_tokens=3)
    room.step()
    room.send("new", 32, max_tokens=9)
    room.step()
    assert room.pinned_jobs == ["held"]
    room.starts(1)
    assert "busy" in room.finished
    room.step()  # The rest of a broken pin is freed by the next step.
    assert room.pinned_jobs == []


# ---- paper ----


def test_paper_starts_with_the_logarithm_of_the_benefit() -> None:
    """Exp(1 s) and η = 1 give ln B for B > 1 s, B = T̄ + PrefillReload. 32 tokens: 3.2 s; 8 tokens: 0.8 s."""
    room = PolicyRoom("paper")
    room.play("a", 32, "ls")
    assert room.held_until_s == pytest.approx(math.log(3.2))
    room.play("b", 8, "ls")
    assert room.pinned_jobs == ["a"]


def test_paper_reloads_where_there_is_a_host_tier() -> None:
    """With a host tier PrefillReload is the copy: 32 tokens of 0.05 s, ln 1.6."""
    room = PolicyRoom("paper", PlainKnowledge(reload_s_per_token=0.05))
    room.play("a", 32, "ls")
    assert room.held_until_s == pytest.approx(math.log(1.6))


def learned_paper_room(command: str) -> PolicyRoom:
    """A room after 101 gaps: 80 of 1 s, then 21 of 5 s, each in a job with one gap."""
    room = PolicyRoom("paper")
    for number in range(101):
        job = f"job {number}"
        room.play(job, 4, command)
        room.wait(1.0 if number < 80 else 5.0)
        room.play(job, 4, is_last_step=True)
    return room


@pytest.mark.parametrize(
    ("num_tokens", "ttl_s"),
    [
        # value of τ = 1: 80/101·B − 1, of τ = 5: B − 5; they are equal at B = 19.24 s.
        (8, 0.0),  # B = 0.8: −0.37 at 1 s
        (16, 1.0),  # B = 1.6: 0.27
        (160, 1.0),  # B = 16: 11.67 against 11
        (240, 5.0),  # B = 24: 18.01 against 19
    ],
)
@pytest.mark.parametrize("command", ["ls", "never seen"])
def test_paper_maximizes_over_the_gaps_seen(num_tokens: int, ttl_s: float, command: str) -> None:
    """The TTL is the argmax of P(τ, f)·B − τ; with too few gaps of this tool, over those of all tools."""
    room = learned_paper_room("ls")
    room.play("new", num_tokens, command)
    if ttl_s:
        assert room.held_until_s == pytest.approx(ttl_s, abs=1e-6)
    else:
        assert room.num_pins == 0


def test_paper_breaks_the_latest_programs_pin_for_whoever_does_not_fit() -> None:
    """Also a new job breaks pins while others run; whole pins, latest program first, until it fits."""
    room = PolicyRoom("paper", num_blocks=32)
    for job in ("first", "second", "third"):
        room.play(job, 32, "ls")
        room.wait(0.1)
    keep_busy(room)
    room.send("new", 40, max_tokens=20)
    assert room.starts(1) == ["new1"]
    room.step()
    assert room.pinned_jobs == ["first", "second"]


# ---- infercept ----


def test_infercept_preserves_until_that_wastes_as_much_as_discarding() -> None:
    """Discarding 40 tokens alone wastes T_fwd·C = 4 s times C, so they are preserved for 4 s, or not at all
    if the tool's mean is longer."""
    room = PolicyRoom("infercept")
    room.play("a", 40, "ls")
    assert room.held_until_s == pytest.approx(4.0)
    room.wait(4.5)
    room.send("a", 1)
    room.run()
    room.play("b", 40, "ls")
    assert room.pinned_jobs == ["a"]
    room.play("c", 48, "ls")
    assert room.pinned_jobs == ["a", "c"]


def test_infercept_counts_what_a_recomputation_holds_up() -> None:
    """Another running turn of 40 tokens doubles it: T_fwd·(C + C_other) / C = 4·80/40 = 8 s."""
    room = PolicyRoom("infercept")
    room.add("other", [1] * 32, max_tokens=20)
    room.step()
    room.send("a", 32, max_tokens=9)
    while "a1" not in room.finished:
        room.step()
    other = room.scheduler.requests["other"].num_computed_tokens
    assert room.held_until_s == pytest.approx(4.0 * (40 + other) / 40)


def test_infercept_swaps_where_that_wastes_least() -> None:
    """Swapping wastes 2·T_swap·(C + C_other): at 0.01 s a token 40 tokens equal 0.8 s of preserving."""
    room = PolicyRoom("infercept", PlainKnowledge(reload_s_per_token=0.01))
    room.play("a", 40, "ls")
    assert room.held_until_s == pytest.approx(0.8)


@pytest.mark.parametrize("reload_s_per_token", [None, 0.01])
def test_infercept_preserves_nothing_of_a_turn_that_computed_nothing(
    reload_s_per_token: float | None,
) -> None:
    """A turn stopped while waiting has no tokens to preserve, nor to divide by."""
    room = PolicyRoom("infercept", PlainKnowledge(reload_s_per_token=reload_s_per_token), max_num_seqs=1)
    keep_busy(room)
    request = room.scheduler.requests[room.send("a", 40)]
    policy = room.scheduler.policy
    assert isinstance(policy, InferceptPolicy)
    tip = BranchTip(Job("a", None, 0.0, 0.0, 0.0), "a1", 1, BlockChain([]), 40, 0.0, (0, 0.0))
    assert policy.ttl_s(tip, request, room.clock.now()) == 0.0
    room.scheduler.finish_requests(["a1"], RequestStatus.FINISHED_STOPPED, room.clock.now())
    assert room.num_pins == 0


# ---- plas ----


def test_plas_serves_the_program_that_was_served_least() -> None:
    """Attained service is the time that a program's turns ran, without waiting; a new program has none."""
    room = PolicyRoom("plas", max_num_seqs=1)
    room.send("long", 4, max_tokens=30)
    room.run()
    room.send("short", 4, max_tokens=10)
    room.run()
    keep_busy(room, max_tokens=2)
    room.send("long", 1)
    room.send("short", 1)
    room.send("new", 4)
    assert room.starts(3) == ["new1", "short2", "long2"]
    assert room.num_pins == 0


def test_plas_promotes_a_program_that_waited_ten_times_its_service() -> None:
    """After 0.3 s of service and 3 s of waiting it goes before a program with 0.1 s of service."""
    room = PolicyRoom("plas", max_num_seqs=1)
    room.send("long", 4, max_tokens=30)
    room.run()
    room.send("short", 4, max_tokens=10)
    room.run()
    room.send("long", 1)
    keep = room.add("busy", [1] * 4, max_tokens=400, job_id="busy")
    assert keep.request_id == "busy"
    room.step()
    room.wait(2.95)
    room.send("short", 1)
    room.wait(0.1)
    assert "long2" in room.finished or room.starts(1) == ["long2"]


# ---- gate ----


def test_gate_bounds_the_contexts_of_jobs_that_have_begun() -> None:
    """Half of 64 blocks is 128 tokens: after a job of 81 tokens a job of 48 waits, one of 40 does not."""
    room = PolicyRoom("gate:0.5")
    room.play("a", 80, "ls")
    room.send("too big", 48)
    room.send("fits", 40)
    assert room.starts(1) == ["fits1"]
    room.run_for(5)
    assert "too big1" in room.scheduler.requests


def test_gate_lets_returning_turns_in_and_counts_their_growth() -> None:
    """An admitted job may return however long its context has become."""
    room = PolicyRoom("gate:0.5")
    room.play("a", 80, "ls")
    room.play("a", 80, "ls")
    assert room.finished["a2"].num_cached_tokens == 80
    room.send("b", 4)
    room.run_for(5)
    assert "b1" in room.scheduler.requests


@pytest.mark.parametrize("how", ["last step", "closed", "answered"])
def test_gate_opens_when_a_job_ends(how: str) -> None:
    """The gate opens if the client closes the job, or if its turn called no tool."""
    room = PolicyRoom("gate:0.5")
    room.play("a", 120, "ls")
    room.send("b", 40)
    room.run_for(5)
    assert "b1" in room.scheduler.requests
    if how == "closed":
        room.finish_job("a")
    elif how == "answered":
        room.tell("a", "a1")
    else:
        room.send("a", 4, is_last_step=True)
    room.run()
    assert "b1" in room.finished


def test_gate_makes_nobody_wait_longer_than_half_an_hour() -> None:
    """The bound is ThunderAgent's, 1800 s."""
    room = PolicyRoom("gate:0.5")
    room.play("a", 120, "ls")
    room.send("b", 40)
    room.wait(1799)
    room.step()
    assert "b1" in room.scheduler.requests
    room.wait(1)
    room.run()
    assert "b1" in room.finished


# ---- known-work and oracle: knowledge of the future ----


def test_known_work_lets_the_job_go_first_that_is_sooner_done() -> None:
    """Of two simultaneous jobs one has 2 s of work left, one 50 s; without a weight arrival decides."""
    for weight, first in ((0, "long"), (1, "short")):
        knowledge = PlainKnowledge(work_s={"long1": 50.0, "short1": 2.0})
        room = PolicyRoom(f"known-work:work_weight={weight}", knowledge, max_num_seqs=1)
        keep_busy(room, max_tokens=3)
        room.send("long", 8)
        room.send("short", 8)
        assert room.starts(1) == [f"{first}1"]


def test_oracle_holds_until_the_return_and_not_after_the_last_turn() -> None:
    """A turn is pinned until its return plus a second for sub-agents, however late; a last one is not."""
    room = PolicyRoom("oracle", PlainKnowledge(gaps_s={"a1": 500.0, "b1": None}))
    room.play("a", 40, "sleep")
    assert room.held_until_s == pytest.approx(501.0)
    room.play("b", 40, "ls")
    assert room.pinned_jobs == ["a"]


def test_oracle_gives_up_what_returns_latest_for_its_worth_when_room_is_short() -> None:
    """Of 64 blocks two sets of 24, each worth 9.6 s of computing, are to be held for 90 and 9,000 s. The
    second costs 9,000·24/64 pool seconds, 352 per second saved, the first 3.5, so dropping one is enough."""
    room = PolicyRoom("oracle", PlainKnowledge(gaps_s={"soon1": 90.0, "late1": 9000.0}))
    room.play("soon", 96, "ls")
    room.play("late", 96, "ls")
    assert room.pinned_jobs == ["late", "soon"]
    room.send("new", 120, is_last_step=True)
    room.run()
    assert room.pinned_jobs == ["soon"]
