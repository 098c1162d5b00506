"""Steps of cores that share experts: at any timing all run the same steps, and none waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from queue import SimpleQueue
from threading import Barrier, Condition, Thread
from typing import cast

import pytest
import torch

from engine.core.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    CachedRequestData,
    ModelRunnerOutput,
    SchedulerOutput,
)
from engine.core_process.waves import Waves
from engine.executor import FinishedOutput
from engine.worker.models.decoder import Decoder
from engine.worker.parallel.expert_peers import ExpertPeers
from engine.worker.parallel.waves import WaveRunner

NUM_CORES, NUM_TOKENS = 3, 60
WITHIN_S = 60.0


class Together:
    """The exchange between cores, which are threads here."""

    def __init__(self) -> None:
        self._board: list[torch.Tensor] = [torch.empty(0)] * NUM_CORES
        self._met = Barrier(NUM_CORES, timeout=WITHIN_S)
        self.bells: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(NUM_CORES)]
        self._num_run = 0
        self._has_run = Condition()

    def note_run(self) -> None:
        with self._has_run:
            self._num_run += 1
            self._has_run.notify_all()

    def await_run(self, count: int) -> None:
        """Waits until this many steps with tokens have run."""
        with self._has_run:
            assert self._has_run.wait_for(lambda: self._num_run >= count, WITHIN_S)

    def meet(self, core: int, x: torch.Tensor) -> torch.Tensor:
        """[num_cores, *x.shape]: the tensors of all cores"""
        self._board[core] = x
        self._met.wait()
        brought = torch.stack(self._board)
        self._met.wait()
        return brought


class Link:
    def __init__(self, core: int, together: Together) -> None:
        self._core, self._together = core, together

    def exchange(self, number: int) -> list[int]:
        told: list[int] = self._together.meet(self._core, torch.tensor(number)).tolist()
        return told

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._together.meet(self._core, x.clone())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._together.meet(self._core, x.clone()).sum(0)


class LateBell:
    """Each core hears of a wave some time after its begin, or even its end."""

    def __init__(self, together: Together) -> None:
        self._together = together

    def ring(self, number: int) -> None:
        for bell in self._together.bells:
            bell.put(number)

    def listen(self, told: Callable[[int], None]) -> None:
        raise NotImplementedError


class Mixture:
    """A layer, and the model that has no others: each core multiplies all tokens by its own factor."""

    def __init__(self, core: int, peers: ExpertPeers) -> None:
        self._factor, self._peers = float(core + 1), peers
        self.num_served = 0

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self._peers.own_sum(self._peers.gather(x) * self._factor)

    def serve_experts(self) -> None:
        assert len(self.mixed(torch.empty(0, 2))) == 0
        self.num_served += 1


class Runner:
    def __init__(self, mixture: Mixture, core: int) -> None:
        self._mixture, self._core = mixture, core

    def launch(self, plan: SchedulerOutput) -> FinishedOutput:
        if plan.total_num_scheduled_tokens:
            x = torch.full((plan.total_num_scheduled_tokens, 2), 10.0 + self._core)
            assert torch.equal(self._mixture.mixed(x), x * sum(range(1, NUM_CORES + 1)))
        return FinishedOutput(EMPTY_MODEL_RUNNER_OUTPUT)

    def close(self) -> None: ...


class Core:
    """An engine core's loop, like that of ``EngineCore``, with tokens at random times."""

    def __init__(self, index: int, together: Together, chance: random.Random) -> None:
        peers = ExpertPeers(index, NUM_CORES, Link(index, together), LateBell(together))
        self.mixture = Mixture(index, peers)
        self._runner = WaveRunner(Runner(self.mixture, index), cast(Decoder, self.mixture), peers)
        self._bell = together.bells[index]
        self._together = together
        self._waves = Waves(NUM_CORES)
        self._changed = Condition()
        self._left = 0
        self._is_over = False
        self._sizes = [chance.randint(1, 5) for _ in range(NUM_TOKENS)]

    def add(self) -> None:
        with self._changed:
            self._left += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._bell.put(0)

    def listen(self) -> None:
        while not self._is_over:
            number = self._bell.get()
            with self._changed:
                self._waves.begun_by_other(number)
                self._changed.notify_all()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._waves.running or self._is_over)
                if not self._left and not self._waves.running:
                    return
                num_tokens = self._sizes[-1] if self._left else 0
                in_wave = self._waves.has_part(num_tokens)
            plan = SchedulerOutput([], CachedRequestData(), {}, num_tokens, set(), set(), in_wave=in_wave)
            result: ModelRunnerOutput = self._runner.launch(plan).result()
            with self._changed:
                self._waves.ended(result.waves_ended)
                if num_tokens:
                    self._left -= 1
                    self._sizes.pop()
                    self._together.note_run()


@pytest.mark.parametrize("seed", range(5))
def test_cores_step_together(seed: int) -> None:
    """Requests come to any core at any time: between waves, as one ends, as another core begins one. All
    cores' experts compute each core's rows."""
    chance, together = random.Random(seed), Together()
    cores = [Core(index, together, chance) for index in range(NUM_CORES)]
    loops = [Thread(target=core.run, daemon=True) for core in cores]
    bells = [Thread(target=core.listen, daemon=True) for core in cores]
    for thread in (*loops, *bells):
        thread.start()
    turns = [core for core in cores for _ in range(NUM_TOKENS)]
    chance.shuffle(turns)
    for number, core in enumerate(turns, 1):
        core.add()
        if chance.random() < 0.3:
            together.await_run(number - chance.randint(0, 2))
    together.await_run(len(turns))
    for core in cores:
        core.end()
    for thread in loops:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    assert all(core.mixture.num_served for core in cores), "each had a part in steps of others"
