"""Learned state survives a restart; a damaged or foreign file is refused in one sentence."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.durations import DurationEstimator
from estimator.growth import what_follows
from estimator.kinds import Kind
from estimator.state import (
    STATE_VERSION,
    EstimatorStateError,
    load_learned,
    restore,
    snapshot,
    write_state,
)
from estimator.tenants import Learned, Tenants
from estimator.tool_key import ToolKey, tool_key

CALLS = [tool_key("bash", "pytest"), tool_key("bash", "ls")]
KEYS = [*CALLS, ToolKey(("(answer)",)), ToolKey(())]


SEEN = st.tuples(st.sampled_from(KEYS), st.floats(0, 1e5), st.booleans())
TURNS = st.tuples(st.lists(st.sampled_from(CALLS), max_size=2), st.none() | st.integers(0, 10**6))


def learn(learned: Learned | Tenants, seen: tuple[ToolKey, float, bool], job: str | None = None) -> None:
    learned.durations.observe(*seen, job=job)


def follow(learned: Learned | Tenants, turn: tuple[list[ToolKey], int | None]) -> None:
    tools, growth_tokens = turn
    if growth_tokens is None:
        learned.turns.observe_last(tools)
    else:
        learned.turns.observe_next(tools, growth_tokens)


def some_learned() -> Learned:
    learned = Learned(DurationEstimator().fit(KEYS, [1.0, 2.0, 3.0, 4.0], [False, True, False, False]))
    follow(learned, (CALLS, 70))
    follow(learned, ([], None))
    return learned


@given(
    seen=st.lists(SEEN, max_size=60),
    later=st.lists(SEEN, max_size=5),
    turns=st.lists(TURNS, max_size=8),
)
def test_restart(
    seen: list[tuple[ToolKey, float, bool]],
    later: list[tuple[ToolKey, float, bool]],
    turns: list[tuple[list[ToolKey], int | None]],
) -> None:
    """After a restart predictions and further learning are exactly those without a restart."""
    running = Learned(DurationEstimator(half_life=5.0, max_keys=8, num_bins=30))
    for observation in seen:
        learn(running, observation, job="before")
    for turn in turns[1:]:
        follow(running, turn)
    restarted = restore(snapshot(running))
    for one in (running, restarted):
        for observation in later:
            learn(one, observation)
        for turn in turns[:1]:
            follow(one, turn)
        learn(one, (CALLS[0], 1.0, False), job="after")
    assert restarted.durations.get_params() == running.durations.get_params()
    for key, job in itertools.product(KEYS, (None, "after")):
        ours, theirs = running.durations.survival(key, job), restarted.durations.survival(key, job)
        assert (ours.probabilities, ours.num_observations) == (theirs.probabilities, theirs.num_observations)
    for tools in ([], CALLS, None):
        assert running.turns.last_turn_probability(tools) == restarted.turns.last_turn_probability(tools)
        assert running.turns.prompt_growth(tools) == restarted.turns.prompt_growth(tools)
    assert snapshot(restarted) == snapshot(running)


def test_file(tmp_path: Path) -> None:
    """A saved file is read back equal; a missing one means a fresh start; no other file is left."""
    path = tmp_path / "tools.json"
    assert load_learned(path).durations.survival(KEYS[0]).num_observations == 0
    learned = some_learned()
    write_state(snapshot(learned), path)
    write_state(snapshot(learned), path)
    assert snapshot(load_learned(path)) == snapshot(learned)
    assert [file.name for file in tmp_path.iterdir()] == ["tools.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A failed write raises, keeps the old file and leaves no temporary file."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError, match="taken"):
        write_state(b"x", tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(FileNotFoundError):
        write_state(b"x", tmp_path / "missing" / "file")


@given(data=st.data())
def test_cut_file(data: st.DataObject) -> None:
    """A file cut at any byte is refused."""
    whole = snapshot(some_learned())
    with pytest.raises(EstimatorStateError):
        restore(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(data=st.data())
def test_damaged_file(data: st.DataObject) -> None:
    """A file with one changed byte is either refused or read as an estimator with valid curves."""
    damaged = bytearray(snapshot(some_learned()))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        learned = restore(bytes(damaged))
    except EstimatorStateError:
        return
    for key in KEYS:
        probabilities = list(learned.durations.survival(key).probabilities)
        assert probabilities == sorted(probabilities)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Another version, another program's file and a folder are each refused in one sentence with the path."""
    path = tmp_path / "tools.json"
    write_state(snapshot(some_learned()), path)
    ours = msgspec.json.decode(path.read_bytes())
    for other, reason in [
        ({**ours, "version": 99}, f"version 99, this program reads version {STATE_VERSION}"),
        ({**ours, "format": "weights"}, "another program"),
        ({**ours, "version": 1}, f"version 1, this program reads version {STATE_VERSION}: move it away"),
        ({**ours, "keys": [[[], [500], [1.0], [0.0], 0.0, 0.0, []]]}, "damaged"),
        ({**ours, "keys": [[[], [5], [1.0], [], 0.0, 0.0, []]]}, "do not match"),
        ({**ours, "keys": [[["bash"], [5], [1.0], [0.0], 0.0, 0.0, []]]}, "key of every call"),
        ({**ours, "keys": [[[], [5], [1.0], None, 0.0, 1.0, [2.0]]]}, "incomplete"),
        ({**ours, "turns": [[["answer"], 1.0, 1.0, 0.0, 0.0]]}, "key of every turn"),
        ({**ours, "half_life": 0}, "half_life must be"),
        ([], "another program"),
    ]:
        path.write_bytes(msgspec.json.encode(other))
        with pytest.raises(EstimatorStateError, match=rf"^The estimator state .*tools.json .*{reason}.*\.$"):
            load_learned(path)
    with pytest.raises(EstimatorStateError, match="cannot be read: Is a directory"):
        load_learned(tmp_path)


def of_tenants() -> Tenants:
    tenants = Tenants()
    for second in range(30):
        for tenant, duration_s in (("alice", 2.0), ("bob", 33.0), ("", 5.0)):
            tenants.observe(tenant, CALLS[0], duration_s, False, f"job of {tenant}", float(second))
    tenants.observe_last("bob", CALLS)
    return tenants


def test_what_each_tenant_learned_survives_too() -> None:
    """Tenants' credit for each other is kept, and so is which tenant is the only one."""
    running = of_tenants()
    restarted = restore(snapshot(running))
    for tenant in ("alice", "bob", "", "eve"):
        before, after = (each.survival(tenant, CALLS[0], None) for each in (running, restarted))
        assert (after.probabilities, after.num_observations) == (
            before.probabilities,
            before.num_observations,
        )
        turns = [each.turns_of(tenant).last_turn_probability(CALLS) for each in (running, restarted)]
        assert turns[0] == turns[1]
    assert snapshot(restarted) == snapshot(running)
    alone = Tenants()
    alone.observe("alice", CALLS[0], 2.0, False, None, 0.0)
    assert restore(snapshot(alone)).survival("bob", CALLS[0], None).num_observations == 0


def test_the_version_before_tenants_is_read_and_written_while_none_has_a_name() -> None:
    """State without tenants belongs to the first tenant that appears."""
    learned = some_learned()
    state = msgspec.json.decode(snapshot(learned))
    assert state["version"] == 3
    old = {name: value for name, value in state.items() if name not in ("only", "tenants", "credit")}
    for name in ("", "alice"):
        restarted = restore(msgspec.json.encode(old))
        curve = restarted.survival(name, CALLS[0], None)
        assert curve.probabilities == learned.durations.survival(CALLS[0]).probabilities
    assert msgspec.json.decode(snapshot(of_tenants()))["version"] == STATE_VERSION == 4


def test_how_contexts_grow_survives_too() -> None:
    """Predictions and further learning are exactly those without a restart."""
    running = Tenants()
    kinds = (Kind("alice", b"agent"), Kind("alice", None), Kind(None, b"other"))
    for turn in range(1, 200):
        kind = kinds[turn % 3]
        running.growth.turn_took(turn / 7)
        running.growth.followed(kind, turn % 9, 31 * turn)
        running.growth.last(kind, turn % 5)
    restarted = restore(snapshot(running))
    for each in (running, restarted):
        each.growth.followed(kinds[0], 3, 17)
        each.growth.turn_took(0.1)
    assert snapshot(restarted) == snapshot(running)
    assert restarted.growth.period_s == running.growth.period_s
    assert msgspec.json.decode(snapshot(running))["version"] == STATE_VERSION, "it names a tenant"
    for kind, number in itertools.product((*kinds, Kind("eve", b"agent")), range(10)):
        ours, theirs = (what_follows(each.growth.counts_of(kind), number) for each in (running, restarted))
        assert ours == theirs


@pytest.mark.parametrize("wrong", [[1.0], [1.0, -2.0], [1.0, "many"], [1e-300, 1.0]])
def test_growth_that_is_damaged_is_refused(wrong: list[object]) -> None:
    """Each number of a turn needs its counts, none below 0, and turns add no more than a context has."""
    learned = Tenants()
    learned.growth.followed(Kind(None, None), 1, 10)
    learned.growth.followed(Kind(None, None), 2, 10)
    state = msgspec.json.decode(snapshot(learned))
    state["growth"][0][3] = wrong
    with pytest.raises(EstimatorStateError, match=r"damaged|turns add more than 100,000,000 tokens each"):
        restore(msgspec.json.encode(state))
