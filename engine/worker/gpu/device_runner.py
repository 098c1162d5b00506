"""Runs steps on the device asynchronously: a plan is sent, computed and sampled there, and the host waits
only when it asks for the sampled tokens. Makes no scheduling decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock

import torch

from engine.core.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenMasks,
)
from engine.records.messages import TokenLogprobs
from engine.records.row_failures import GRAMMAR_LEFT, NOT_NUMBERS, NOTHING_ALLOWED
from engine.worker.gpu.device_batch import DeviceBatch, DeviceStep
from engine.worker.gpu.device_sampler import DeviceSampler, Logprobs
from engine.worker.gpu.forward import Forward
from engine.worker.gpu.streams import DeviceStreams, Mark
from engine.worker.kv_tiers.host_pool import HostTransfers, with_reports
from engine.worker.media.step_media import without
from engine.worker.sampler import TokenBitmask
from engine.worker.verification import Verified


@dataclass(frozen=True, slots=True)
class Fetched:
    """The output of a step, in host memory once ``mark`` is reached."""

    token_ids: torch.Tensor
    """[num_samples] int64."""
    scores: torch.Tensor | None
    """[num_samples] scores of the tokens; see Sampled."""
    logprobs: Logprobs | None
    mark: Mark


class DeviceModelRunner:
    """A model on a device, its sampler, and the rows of its requests.

    A second step may be launched before the result of the first is requested. Results are requested in order,
    possibly on another thread than that of the launches.
    """

    def __init__(
        self,
        forward: Forward,
        batch: DeviceBatch,
        sampler: DeviceSampler,
        streams: DeviceStreams,
        host_pool: HostTransfers | None = None,
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._sampler = sampler
        self._streams = streams
        self._host_pool = host_pool
        self._last: StepInFlight | None = None
        self._queuing = RLock()
        """Lock held while work is queued on the device."""

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> StepInFlight:
        """Queue a step. Does not wait for its masks, which may depend on the result of the previous step."""
        with self._queuing:
            return self._launch(plan)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step and wait for it."""
        return self.launch(plan).result()

    def close(self) -> None:
        """Stop the transfers to and from the host tier."""
        if self._host_pool is not None:
            self._host_pool.close()

    @torch.inference_mode()
    def sample(self, in_flight: StepInFlight) -> None:
        """Queue the sampling of a step unless that is done; waits only for its masks."""
        with self._queuing:
            if in_flight.step is not None and in_flight.logits is not None:
                masks = in_flight.masks
                known = None if masks is None else masks.result()
                in_flight.fetched = self._choose(in_flight.step, in_flight.logits, known)
                in_flight.logits = None

    def settle(self, in_flight: StepInFlight) -> None:
        """Of a step with drafts: wait for what it sampled, and let the rows grow by what is accepted, unless
        that is done. Nothing is planned behind such a step before its output is known, so nobody waits who
        would not wait anyway."""
        with self._queuing:
            step = in_flight.step
            fetched = in_flight.fetched
            if (
                step is None
                or step.sampled_drafts is None
                or fetched is None
                or in_flight.verified is not None
            ):
                return
            fetched.mark.synchronize()
            in_flight.verified = self._batch.take_verified(step.sampled_drafts, fetched.token_ids.numpy())

    def reported(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """The output with the transfers that have completed since the last one."""
        if self._host_pool is None:
            return output
        with self._queuing:
            return with_reports(output, self._host_pool.take_reports())

    def _launch(self, plan: SchedulerOutput) -> StepInFlight:
        if self._last is not None:
            self.sample(self._last)  # the next step overwrites its logits and reads its tokens
            self.settle(self._last)
        host = self._host_pool
        if host is not None:
            host.begin_step(plan)
        step = self._batch.send(plan)
        logits = None
        told = dict[str, PromptLogprobs]()
        if step is not None and step.prompts:
            logits, told = self._forward.told(step)
        elif step is not None:
            logits = self._forward.logits(step)
        if host is not None:
            host.end_step(plan)
        self._last = in_flight = StepInFlight(self, plan, step, logits)
        in_flight.told = told
        if self._batch.media is not None:
            in_flight.lost = self._batch.media.end_step()
        if in_flight.masks is None or in_flight.masks.done():
            self.sample(in_flight)
        return in_flight

    def _choose(self, step: DeviceStep, logits: torch.Tensor, masks: TokenMasks | None) -> Fetched:
        """Sample the tokens; queue their copies to the rows and to the host."""
        forbidden = None if masks is None else _forbidden(masks, step)
        sampled = self._sampler.sample(logits, step.sampling, self._batch.token_ids, forbidden)
        self._batch.store_sampled(step, sampled.token_ids)
        fetch = self._streams.fetch
        logprobs = sampled.logprobs
        if logprobs is not None:
            logprobs = Logprobs(fetch(logprobs.token_ids), fetch(logprobs.values), fetch(logprobs.ranks))
        scores = None if sampled.scores is None else fetch(sampled.scores)
        return Fetched(fetch(sampled.token_ids), scores, logprobs, self._streams.mark())


class StepInFlight:
    """A step that is queued on the device."""

    def __init__(
        self,
        runner: DeviceModelRunner,
        plan: SchedulerOutput,
        step: DeviceStep | None,
        logits: torch.Tensor | None,
    ) -> None:
        self._runner = runner
        self.plan = plan
        self.step = step
        self.logits = logits
        """None: there are no tokens, or they are sampled already."""
        self.fetched: Fetched | None = None
        self.told: Mapping[str, PromptLogprobs] = {}
        """Log-probabilities of prompts whose requests asked, by request id."""
        self.lost: frozenset[str] = frozenset()
        """Requests whose media could not be read."""
        self.verified: Verified | None = None
        """What is left of its samples, once it is settled; None: all of them, as there are no drafts."""

    @property
    def masks(self) -> Future[TokenMasks] | None:
        """The plan's, if the step samples; in a pipeline the last stage does."""
        samples = self.step is not None and len(self.step.sample_seqs)
        return self.plan.masks if samples else None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        self._runner.sample(self)
        self._runner.settle(self)
        return self._runner.reported(self._output())

    def _output(self) -> ModelRunnerOutput:
        step = self.step
        fetched = self.fetched
        if step is None or fetched is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        fetched.mark.synchronize()
        seqs = step.sample_seqs.tolist()
        token_ids = fetched.token_ids.tolist()
        taken = range(len(seqs)) if self.verified is None else self.verified.samples.tolist()
        sampled: list[list[int]] = [[] for _ in step.req_ids]
        for sample in taken:
            sampled[seqs[sample]].append(token_ids[sample])
        logprobs = _logprobs(step, fetched.logprobs, taken)
        failed = _failed(self.plan, step, fetched.scores, taken)
        result = ModelRunnerOutput(step.req_ids, sampled, logprobs, failed=failed, prompt_logprobs=self.told)
        return without(self.lost, result)


def _forbidden(masks: TokenMasks, step: DeviceStep) -> TokenBitmask | None:
    """The grammar masks with the index of each among the samples: the masks of a request are those of its
    first samples, in order."""
    if not masks.req_ids:
        return None
    samples: dict[str, list[int]] = {}
    for sample, seq in enumerate(step.sample_seqs.tolist()):
        samples.setdefault(step.req_ids[seq], []).append(sample)
    in_order = {req_id: iter(own) for req_id, own in samples.items()}
    return TokenBitmask([next(in_order[req_id]) for req_id in masks.req_ids], masks.forbidden)


def _failed(
    plan: SchedulerOutput, step: DeviceStep, scores: torch.Tensor | None, taken: Sequence[int]
) -> dict[str, str]:
    """By request id, why no token could be sampled for it."""
    if scores is None or not len(scores) or math.isfinite(scores.sum(dtype=torch.float64).item()):
        return {}
    limited = frozenset() if plan.masks is None else frozenset(plan.masks.result().req_ids)
    seqs = step.sample_seqs.tolist()
    values = scores.tolist()
    reasons = {}
    for sample in taken:
        if not math.isfinite(values[sample]):
            req_id = step.req_ids[seqs[sample]]
            impossible = GRAMMAR_LEFT if req_id in limited else NOTHING_ALLOWED
            reasons[req_id] = impossible if values[sample] == -math.inf else NOT_NUMBERS
    return reasons


def _logprobs(
    step: DeviceStep, logprobs: Logprobs | None, taken: Sequence[int]
) -> dict[str, list[TokenLogprobs]]:
    """Log-probabilities by request id, of the samples that are taken."""
    wanted = step.sampling.logprobs
    if wanted is None or logprobs is None:
        return {}
    lines = zip(
        wanted.samples,
        wanted.counts,
        logprobs.token_ids.tolist(),
        logprobs.values.tolist(),
        logprobs.ranks.tolist(),
        strict=True,
    )
    is_taken = frozenset(taken)
    told: dict[str, list[TokenLogprobs]] = {}
    for sample, count, ids, values, rank in lines:
        if sample in is_taken:
            entry = TokenLogprobs(ids[: count + 1], values[: count + 1], rank)
            told.setdefault(step.req_ids[step.sample_seqs[sample]], []).append(entry)
    return told
