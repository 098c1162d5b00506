"""Runs one step: plan to arrays, arrays to logits, logits to tokens. Makes no scheduling decision."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput, TokenMasks
from engine.records.messages import TokenLogprobs
from engine.worker.attention.backend import AttentionBackend, IntArray
from engine.worker.cpu.input_batch import InputBatch, StepInputs
from engine.worker.kv_tiers.host_pool import HostTransfers, with_reports
from engine.worker.models.base import CausalModel
from engine.worker.prompt_logprobs import prompt_logprobs
from engine.worker.sampler import Sampler, SamplerOutput, TokenBitmask
from engine.worker.step_part import StepParts
from engine.worker.verification import Verified, verify


class ModelRunner:
    """A model, its paged attention, its sampler, and the rows of the requests it serves."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        batch: InputBatch,
        sampler: Sampler,
        device: torch.device,
        host_pool: HostTransfers | None = None,
        parts: StepParts | None = None,
    ) -> None:
        """``parts``: the features that are on."""
        self._model: CausalModel | None = model
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._device = device
        self._host_pool = host_pool
        self._parts = StepParts() if parts is None else parts

    def use_model(self, model: CausalModel | None) -> None:
        """Run steps with this model from now on; None: there is no step before the next call."""
        self._model = model

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the plan's deltas, run its tokens, and sample the requests that are fully computed. Offloaded
        blocks are loaded before the step and stored after it."""
        self._batch.update(plan)
        self._parts.update(plan)
        host = self._host_pool
        if host is None:
            return self._run(plan)
        host.begin_step(plan)
        result = self._run(plan)
        host.end_step(plan)
        return with_reports(result, host.take_reports())

    def close(self) -> None:
        """Stop background transfers."""
        if self._host_pool is not None:
            self._host_pool.close()

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if plan.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = self._batch.step_inputs(plan)
        logits = self._forward(plan, step, step.logit_tokens)
        masks = plan.masks.result() if plan.masks is not None and len(step.sample_seqs) else None
        num_samples = len(step.sample_tokens)
        told = prompt_logprobs(logits[num_samples:], step.prompts) if step.prompts and logits.shape[1] else {}
        result = self._sample(logits[:num_samples], step, masks)
        result.prompt_logprobs = told
        self._parts.end(plan, step, result)
        return result

    def _forward(self, plan: SchedulerOutput, step: StepInputs, rows: IntArray) -> torch.Tensor:
        """What the model returns for these tokens of the step: [len(rows), vocab_size]"""
        self._attention.begin_step(step.attention)
        self._parts.begin(plan, step)
        assert self._model is not None, "it sleeps"
        return self._model.forward(
            self._to_device(step.input_ids),
            self._to_device(step.positions),
            self._to_device(rows),
            self._attention,
        )

    def _sample(self, logits: torch.Tensor, step: StepInputs, masks: TokenMasks | None) -> ModelRunnerOutput:
        sampled: list[list[int]] = [[] for _ in step.req_ids]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        failed: dict[str, str] = {}
        if len(step.sample_seqs):
            batch = self._batch.sampling_batch(step)
            forbidden = _forbidden(masks, step) if masks is not None else None
            chosen = self._sampler.sample(logits, batch, self._batch.token_ids, forbidden)
            if step.sample_drafts is not None:
                return self._take_verified(step, chosen, step.sample_drafts)
            self._batch.append_sampled(step.sample_rows, chosen.token_ids)
            seqs: list[int] = step.sample_seqs.tolist()
            for seq, token_id in zip(seqs, chosen.token_ids.tolist(), strict=True):
                sampled[seq].append(token_id)
            logprobs = {step.req_ids[seqs[i]]: [entry] for i, entry in chosen.logprobs.items()}
            failed = {step.req_ids[seqs[i]]: reason for i, reason in chosen.failed.items()}
        return ModelRunnerOutput(step.req_ids, sampled, logprobs, failed=failed)

    def _take_verified(
        self, step: StepInputs, chosen: SamplerOutput, num_drafts: IntArray
    ) -> ModelRunnerOutput:
        """Of a step with drafts: take those that were sampled, and one token more of each sequence."""
        inputs = step.input_ids[step.sample_tokens]
        verified = verify(num_drafts, inputs, chosen.token_ids)
        self._batch.take_verified(verified, step.sample_rows, chosen.token_ids)
        result = ModelRunnerOutput(step.req_ids, [[] for _ in step.req_ids])
        seqs = step.sample_seqs[verified.starts].tolist()
        if self._parts.settles:
            self._parts.settle(dict(zip(seqs, (verified.counts - 1).tolist(), strict=True)))
        for seq, start, end in zip(seqs, verified.starts.tolist(), verified.ends.tolist(), strict=True):
            req_id = step.req_ids[seq]
            result.sampled_token_ids[seq] = chosen.token_ids[start:end].tolist()
            if start in chosen.logprobs:
                result.logprobs[req_id] = [chosen.logprobs[i] for i in range(start, end)]
        failed = {i: reason for i, reason in chosen.failed.items() if _is_taken(i, verified)}
        result.failed = {step.req_ids[step.sample_seqs[i]]: reason for i, reason in failed.items()}
        return result

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _forbidden(masks: TokenMasks, step: StepInputs) -> TokenBitmask:
    """The masks with the index of each request among the sampled ones: of its first sample, and of those
    behind its drafts."""
    places: dict[str, list[int]] = {}
    for index, seq in enumerate(step.sample_seqs.tolist()):
        places.setdefault(step.req_ids[seq], []).append(index)
    next_place = {req_id: iter(indices) for req_id, indices in places.items()}
    return TokenBitmask([next(next_place[req_id]) for req_id in masks.req_ids], masks.forbidden)


def _is_taken(index: int, verified: Verified) -> bool:
    """Whether a sample is among those that are taken."""
    place = int(np.searchsorted(verified.starts, index, side="right")) - 1
    return bool(index < verified.ends[place])
