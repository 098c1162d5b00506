"""Runs one step of a decoder that pools: turns a plan into arrays, hidden states, and answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.core.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput
from engine.records.pooling import Pooled, PoolingParams
from engine.records.row_failures import NOT_NUMBERS, processing_failed
from engine.worker.attention.backend import IntArray
from engine.worker.cpu.input_batch import StepInputs
from engine.worker.cpu.model_runner import ModelRunner
from engine.worker.models.decoder import Decoder
from engine.worker.pooling.pooler import Pooler

PLACEHOLDER = 0
"""The token with which the scheduler ends a request, as an answer has no token."""

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)
"""Rows that earlier stages of a pipeline compute: none, as the last stage answers."""


class PoolingRunner(ModelRunner):
    """A ModelRunner whose model returns hidden states instead of logits."""

    def __init__(self, pooler: Pooler, *parts: Any) -> None:
        """``parts``: the arguments of a ModelRunner."""
        super().__init__(*parts)
        self._pooler = pooler
        self._asked: dict[str, PoolingParams] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}
        """Hidden states of prompts that take several steps, if all rows are needed."""

    def use_pooler(self, pooler: Pooler | None) -> None:
        """Pool with this pooler from now on."""
        assert pooler is not None, "the model pools"
        self._pooler = pooler

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in plan.finished_req_ids:
            self._asked.pop(req_id, None)
            self._rows.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            self._asked[new.req_id] = new.pooling or PoolingParams()
        if plan.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = self._batch.step_inputs(plan)
        if isinstance(self._model, Decoder) and not self._model.is_last:
            self._forward(plan, step, _NO_ROWS)
            return ModelRunnerOutput(step.req_ids, [[] for _ in step.req_ids])
        wanted = self._wanted(step)
        hidden = self._forward(plan, step, np.concatenate(wanted))
        result = ModelRunnerOutput(step.req_ids, [[] for _ in step.req_ids])
        parts = torch.split(hidden, [len(tokens) for tokens in wanted])
        complete = set(step.sample_seqs.tolist())
        pooled: dict[str, Pooled] = {}
        failed: dict[str, str] = {}
        for seq, (req_id, rows) in enumerate(zip(step.req_ids, parts, strict=True)):
            rows = self._with_earlier(req_id, rows, is_complete=seq in complete)
            if seq in complete:
                result.sampled_token_ids[seq] = [PLACEHOLDER]
                self._answer(req_id, rows, pooled, failed)
        self._batch.append_sampled(step.sample_rows, np.full(len(step.sample_rows), PLACEHOLDER))
        result.pooled = pooled
        result.failed = failed
        return result

    def _wanted(self, step: StepInputs) -> list[IntArray]:
        """The tokens of the step whose hidden states are needed, sequence by sequence."""
        ends = np.cumsum(step.attention.query_lens)
        starts = ends - step.attention.query_lens
        complete = set(step.sample_seqs.tolist())
        return [
            np.arange(start if self._pooler.needs_all(self._asked[req_id]) else end - (seq in complete), end)
            for seq, (req_id, start, end) in enumerate(zip(step.req_ids, starts, ends, strict=True))
        ]

    def _with_earlier(self, req_id: str, rows: torch.Tensor, *, is_complete: bool) -> torch.Tensor:
        """All rows of a prompt so far; those of an incomplete prompt are kept."""
        if not self._pooler.needs_all(self._asked[req_id]):
            return rows
        earlier = self._rows.pop(req_id, [])
        if is_complete:
            return torch.cat([*earlier, rows]) if earlier else rows
        self._rows[req_id] = [*earlier, rows.clone()]  # the next step may overwrite them
        return rows

    def _answer(
        self, req_id: str, rows: torch.Tensor, pooled: dict[str, Pooled], failed: dict[str, str]
    ) -> None:
        """Pool one prompt; an error ends only this request."""
        try:
            answer = self._pooler.pool(rows, self._asked[req_id])
        except Exception as error:
            failed[req_id] = processing_failed("The pooling", error)
            return
        if np.isfinite(answer.array()).all():
            pooled[req_id] = answer
        else:
            failed[req_id] = NOT_NUMBERS
