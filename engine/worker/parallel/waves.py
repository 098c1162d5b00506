"""Steps of cores that share experts: either all cores run one, or none does.

A wave is a series of steps without a pause: it begins when a core has tokens while all are idle, and ends
with a step in which no core has any. The core that begins it writes its number to the process group's store,
where the others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import PendingOutput
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.parallel.expert_peers import ExpertPeers
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.step_runner import StepRunner


class WaveRunner:
    """A StepRunner of a core that shares experts. It wraps a runner whose ``launch`` runs or queues each step
    before it returns."""

    def __init__(self, runner: StepRunner, model: Decoder, peers: ExpertPeers) -> None:
        self._runner = runner
        self._model = model
        self._peers = peers
        self._in_wave = False
        self._num_ended = 0

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        if not plan.in_wave:
            return self._runner.launch(plan)
        num_tokens = plan.total_num_scheduled_tokens
        if num_tokens and not self._in_wave and self._peers.bell is not None:
            self._peers.bell.ring(self._num_ended + 1)
        self._in_wave = self._peers.begin_step(num_tokens)
        try:
            pending = self._runner.launch(plan)
            if self._in_wave and not num_tokens:
                self._model.serve_experts()
        finally:
            self._peers.end_step()
        self._num_ended += not self._in_wave
        return _StepOfWave(pending, self._num_ended)

    def listen(self, told: Callable[[int], None]) -> None:
        """See ``Executor.on_wave``."""
        if self._peers.bell is not None:
            self._peers.bell.listen(told)

    def close(self) -> None:
        self._runner.close()


def with_waves(runner: StepRunner, model: CausalModel, group: TensorParallelGroup) -> StepRunner:
    """The runner itself if the core has all experts, otherwise a WaveRunner around it."""
    if group.peers.num_cores == 1:
        return runner
    assert isinstance(model, Decoder), "load_model() refuses others"
    return WaveRunner(runner, model, group.peers)


@dataclass(frozen=True, slots=True)
class _StepOfWave:
    """A PendingOutput."""

    pending: PendingOutput
    num_ended: int

    def result(self) -> ModelRunnerOutput:
        return replace(self.pending.result(), waves_ended=self.num_ended)
