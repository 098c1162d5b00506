"""The parts of a CPU's runner, in the order in which they are called, with the reasons for it."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.worker.cpu.input_batch import StepInputs
from engine.worker.drafts.drafter import WorkerDrafter
from engine.worker.lora.adapter_store import AdapterStore
from engine.worker.media.step_media import StepMedia, without
from engine.worker.model_states import drafts_of, state_batch
from engine.worker.models.hidden_tap import HiddenTap
from engine.worker.models.routing_recorder import RoutingRecorder
from engine.worker.states.state_pool import StatePool
from engine.worker.step_part import StepPart, StepParts


class StatePart(StepPart):
    """States of linear attention and Mamba layers."""

    def __init__(self, states: StatePool) -> None:
        self._states = states

    def begin(self, plan: SchedulerOutput, step: StepInputs) -> None:
        batch = state_batch(plan, step.req_ids, step.query_lens)
        self._states.begin_step(batch, drafts_of(plan, step.req_ids))

    def settle(self, accepted: Mapping[int, int]) -> None:
        self._states.settle(accepted)


class AdapterPart(StepPart):
    """LoRA adapters."""

    def __init__(self, adapters: AdapterStore) -> None:
        self._adapters = adapters

    def begin(self, plan: SchedulerOutput, step: StepInputs) -> None:
        self._adapters.begin_step(step.adapters, step.query_lens)


class MediaPart(StepPart):
    """Pictures and clips of prompts."""

    def __init__(self, media: StepMedia) -> None:
        self._media = media

    def update(self, plan: SchedulerOutput) -> None:
        self._media.update(plan)

    def begin(self, plan: SchedulerOutput, step: StepInputs) -> None:
        step.positions = self._media.begin_step(plan, step)

    def end(self, plan: SchedulerOutput, step: StepInputs, result: ModelRunnerOutput) -> None:
        without(self._media.end_step(), result)


class RoutingPart(StepPart):
    """The experts of each token, for clients that want them."""

    def __init__(self, recorder: RoutingRecorder) -> None:
        self._recorder = recorder

    def end(self, plan: SchedulerOutput, step: StepInputs, result: ModelRunnerOutput) -> None:
        result.routing = self._recorder.take(step.slots)


class DrafterPart(StepPart):
    """A drafter with weights."""

    def __init__(self, drafter: WorkerDrafter, tap: HiddenTap | None) -> None:
        """``tap``: where it reads the model's hidden states; None for one that reads only tokens."""
        self._drafter = drafter
        self._tap = tap

    def end(self, plan: SchedulerOutput, step: StepInputs, result: ModelRunnerOutput) -> None:
        hidden = None if self._tap is None else self._tap.hidden
        result.drafts = self._drafter.draft(plan, step, result.sampled_token_ids, hidden)


def parts_of(
    *,
    states: StatePool | None,
    adapters: AdapterStore | None,
    media: StepMedia | None,
    recorder: RoutingRecorder | None,
    drafter: WorkerDrafter | None,
    tap: HiddenTap | None,
) -> StepParts:
    """The parts of the features that are on; None is a feature that is off."""
    in_order = (
        None if states is None else StatePart(states),
        None if adapters is None else AdapterPart(adapters),
        # Before the drafter: a request whose media are lost has a placeholder token, which is drafted upon.
        None if media is None else MediaPart(media),
        None if recorder is None else RoutingPart(recorder),
        # Last: its own steps use the attention of the step again.
        None if drafter is None else DrafterPart(drafter, tap),
    )
    return StepParts(part for part in in_order if part is not None)
