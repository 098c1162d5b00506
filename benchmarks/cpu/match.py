"""Measures all contenders on one model: starts them, warms them up, then measures them in turns, so that
other work on the machine affects all of them. Pauses servers outside their turn; drops one from a case it
fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from benchmarks.cpu.cases import MEMORY, MEMORY_PEAK, START, Case, Figure, Reading
from benchmarks.cpu.contender import OURS, Contender
from benchmarks.cpu.server import Server
from eval.errors import ServerError
from eval.say import say

T = TypeVar("T")

CASE_TIMEOUT_S = 600.0
WARM_UP = -1
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    cases: Sequence[Case]
    groups: frozenset[str]
    """Groups of the cases that were requested, including "start" and "memory"."""
    num_rounds: int
    seed: int

    def cases_of(self, contender: Contender) -> list[Case]:
        return [case for case in self.cases if case.group in self.groups & contender.groups]

    def chance(self, case: Case, number: int) -> Random:
        """Returns the same generator for all contenders, a different one in each round."""
        return Random(f"{self.seed}/{case.title}/{number}")


@dataclass(slots=True)
class Measured:
    """The results of a match."""

    readings: dict[str, dict[Figure, list[float]]] = field(default_factory=dict)
    """Readings by contender, figures in the order of the cases; a value for each round."""
    failures: list[str] = field(default_factory=list)
    """One sentence per failure."""
    ours_failed: bool = False

    def add(self, contender: str, reading: Reading) -> None:
        figures = self.readings.setdefault(contender, {})
        figures.setdefault(reading.figure, []).append(reading.value)

    def fail(self, contender: str, what: str, error: BaseException) -> None:
        sentence = f"{contender}: {what} failed: {str(error).rstrip('.') or type(error).__name__}."
        self.failures.append(sentence)
        self.ours_failed |= contender == OURS
        say(sentence)


class Match:
    """Runs the contenders on one model."""

    def __init__(self, model: str, plan: Plan, contenders: Sequence[Contender], log_folder: Path) -> None:
        self._model = model
        self._plan = plan
        self._contenders = list(contenders)
        self._log_folder = log_folder
        self._running: list[tuple[Server, list[Case]]] = []
        """Running servers with the cases that each still takes part in."""
        self.measured = Measured()

    async def play(self) -> Measured:
        """Runs all rounds. Reports a server that does not start, even ours, and goes on without it."""
        try:
            if "start" in self._plan.groups:
                await self._time_starts()
            for contender in list(self._contenders):
                await self._enter(contender)
            await self._each_case(WARM_UP)
            for number in range(self._plan.num_rounds):
                await self._each_case(number)
                if "memory" in self._plan.groups:
                    self._read_memory()
        finally:
            for server, _ in self._running:
                server.stop()
        return self.measured

    async def _time_starts(self) -> None:
        """Times all starts but the last; the server of the last start is the one that is measured."""
        for number in range(1, self._plan.num_rounds):
            for contender in _rotated(self._contenders, number):
                if "start" in contender.groups:
                    await self._start(Server(contender, self._log_folder), stay=False)

    async def _enter(self, contender: Contender) -> None:
        server = Server(contender, self._log_folder)
        if await self._start(server, stay=True):
            server.rest()
            self._running.append((server, self._plan.cases_of(contender)))

    async def _start(self, server: Server, *, stay: bool) -> bool:
        """Returns whether the server runs now. Stops it in any case unless ``stay``."""
        name = server.contender.name
        runs = False
        try:
            took_s = await server.start()
            runs = stay
        except ServerError as error:
            self.measured.fail(name, f"the start for {self._model}", error)
            self._contenders.remove(server.contender)
        else:
            say(f"{self._model}: {name} answered after {took_s:.2f} s")
            if "start" in self._plan.groups:
                self.measured.add(name, Reading(START, took_s))
        finally:
            if not runs:
                server.stop()
        return runs

    async def _each_case(self, number: int) -> None:
        for case in self._plan.cases:
            for server, cases in _rotated(self._running, number):
                if case not in cases:
                    continue
                server.wake()
                if not await self._tried(case, server, number):
                    cases.remove(case)
                server.rest()

    async def _tried(self, case: Case, server: Server, number: int) -> bool:
        """Returns whether the case could be done."""
        name = server.contender.name
        chance = self._plan.chance(case, number)
        try:
            async with asyncio.timeout(CASE_TIMEOUT_S):
                if number == WARM_UP:
                    await case.warm_up(server.caller, chance)
                    return True
                readings = await case.measure(server.caller, chance)
        except (ServerError, OSError, EOFError) as error:
            server.caller.close()
            self.measured.fail(name, f"{self._model}, {case.title}", error)
            return False
        for reading in readings:
            self.measured.add(name, reading)
        told = f"{name} {readings[0].value:,.1f} ({readings[0].figure.label.rpartition(': ')[2]})"
        say(f"{self._model}, round {number + 1} of {self._plan.num_rounds}: {case.title}: {told}")
        return True

    def _read_memory(self) -> None:
        for server, _ in self._running:
            if "memory" in server.contender.groups and (held := server.resident()):
                self.measured.add(server.contender.name, Reading(MEMORY, held.now / MB))
                self.measured.add(server.contender.name, Reading(MEMORY_PEAK, held.peak / MB))


def _rotated(items: Sequence[T], number: int) -> list[T]:
    """Returns all items, beginning with a different one for each number."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]
