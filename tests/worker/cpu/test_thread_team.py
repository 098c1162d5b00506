"""The number of threads of a step, on a machine with given speed and other work."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.worker.cpu.thread_team import MAX_STEPS_BETWEEN_TRIALS, ThreadTeam

WORK_S = 0.02


@dataclass
class Machine:
    """A machine that divides a step's work by the number of threads; a step of the full team takes ``stall``
    times as long, in which its first thread works no longer than without other work."""

    stall: float = 1.0
    work_s: float = WORK_S
    now: float = 0.0
    busy: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def step(self, threads: int) -> None:
        alone = self.work_s / threads
        self.busy += alone
        self.now += alone * (self.stall if threads == 2 else 1.0)
        self.sizes.append(threads)

    def team(self, size: int = 2) -> ThreadTeam:
        return ThreadTeam(size, clock=lambda: self.now, busy_clock=lambda: self.busy)


def run(machine: Machine, team: ThreadTeam, num_steps: int, num_tokens: int = 32) -> list[int]:
    machine.sizes.clear()
    for _ in range(num_steps):
        team.compute(num_tokens, machine.step)
    return machine.sizes


def test_alone_it_is_always_all() -> None:
    machine = Machine()
    assert set(run(machine, machine.team(), 1000)) == {2}


def test_where_one_is_kept_from_its_core_the_others_do_without() -> None:
    """After a few steps one thread is left out, and over many steps the few trials of all cost little."""
    machine = Machine(stall=3.0)
    sizes = run(machine, machine.team(), 1000)
    assert 1 in sizes[:5]
    assert machine.now < 1.03 * 1000 * WORK_S
    assert sizes[-100:].count(2) <= 1


def test_with_the_core_back_it_is_all_again() -> None:
    machine = Machine(stall=3.0)
    team = machine.team()
    run(machine, team, 1000)
    machine.stall = 1.0
    assert set(run(machine, team, 1000)[3 * MAX_STEPS_BETWEEN_TRIALS :]) == {2}


def test_what_was_measured_a_while_ago_is_of_no_use() -> None:
    """After a while the next step uses all threads, however clearly fewer were better."""
    machine = Machine(stall=3.0)
    team = machine.team()
    assert run(machine, team, 100)[-1] == 1
    machine.now += 0.9
    assert run(machine, team, 20)[-1] == 1
    machine.now += 1.1
    assert run(machine, team, 1) == [2]


def test_one_stall_means_nothing() -> None:
    machine = Machine()
    team = machine.team()
    for _ in range(100):
        machine.stall = 3.0
        assert run(machine, team, 1) == [2]
        machine.stall = 1.0
        assert set(run(machine, team, 9)) == {2}


def test_short_steps_are_computed_by_all() -> None:
    """In short steps, waking a thread costs more than other work does."""
    machine = Machine(stall=3.0, work_s=0.003)
    assert set(run(machine, machine.team(), 1000)) == {2}


def test_all_stay_where_fewer_would_be_slower() -> None:
    """The stall costs less than a thread brings: fewer are tried less and less often."""
    machine = Machine(stall=1.5)
    sizes = run(machine, machine.team(), 1000)
    assert 0 < sizes[:100].count(1) < 10
    assert sizes[-500:].count(1) <= 500 // MAX_STEPS_BETWEEN_TRIALS + 1


def test_steps_of_each_size_have_a_number_of_their_own() -> None:
    """Stalls of large steps do not affect small ones."""
    machine = Machine(stall=3.0)
    team = machine.team()
    assert set(run(machine, team, 50, num_tokens=300)[-5:]) == {1}
    machine.stall = 1.0
    assert set(run(machine, team, 50, num_tokens=1)) == {2}


@pytest.mark.parametrize(("size", "num_tokens"), [(1, 32), (2, 0)])
def test_nothing_is_measured_where_there_is_no_choice(size: int, num_tokens: int) -> None:
    machine = Machine(stall=3.0)
    assert set(run(machine, machine.team(size), 100, num_tokens)) == {size}
