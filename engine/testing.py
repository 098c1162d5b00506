"""A fake executor for tests, whose tokens are a function of request and position. Needs no torch.

A test of both executors checks that it keeps the real one's contract. It can die, fail or hang on request.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from engine.config.engine_config import CacheConfig, EngineConfig
from engine.core.offload.disk_tier import DiskLevel
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput, TokenMasks
from engine.errors import EngineError, ModelLoadError
from engine.executor import FinishedOutput, ModelInfo, PendingOutput
from engine.records.media import MediaModels
from engine.records.messages import TokenLogprobs
from engine.records.sampling_params import SamplingParams

BYTES_PER_BLOCK = 2**20
"""Assumed size of a block, for limits that are given in bytes."""


def fake_token(request_id: str, position: int, vocab_size: int) -> int:
    """The token at ``position`` of a request's output, by its external or internal id."""
    external_id = request_id.rsplit("-", 1)[0]
    return crc32(f"{external_id}:{position}".encode()) % vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeExecutorFactory:
    """Makes a ``FakeExecutor``; picklable, so it also works in a core process. Steps are counted from 1."""

    vocab_size: int = 512
    max_model_len: int = 4096
    num_gpu_blocks: int = 1024
    fail_at_start: str | None = None
    """Raise ModelLoadError with this text."""
    kill_at_step: int | None = None
    """Kill the process in this step, as ``kill -9`` does."""
    raise_at_step: int | None = None
    load_steps: int = 1
    """Steps until a load from the host tier is reported as done; 1 is the step that started it."""
    fail_load: int | None = None
    """Fail this load, counted from 1."""
    media: MediaModels | None = None
    """How it reads pictures and audio, which change no token."""
    gate: Path | None = None
    """A named pipe: no step returns before a test has opened it for writing and closed it again."""

    def __call__(self, config: EngineConfig) -> FakeExecutor:
        if self.fail_at_start is not None:
            raise ModelLoadError(self.fail_at_start)
        return FakeExecutor(self, config)


@dataclass(slots=True)
class _Row:
    """A worker's state of one request."""

    params: SamplingParams
    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens known so far, prompt and output."""


@dataclass(frozen=True, slots=True)
class _LateStep:
    """A ``PendingOutput`` whose step runs when its result is requested."""

    executor: FakeExecutor
    plan: SchedulerOutput

    def result(self) -> ModelRunnerOutput:
        return self.executor.run(self.plan)


class FakeExecutor:
    """Runs step plans without a model."""

    def __init__(self, behavior: FakeExecutorFactory, config: EngineConfig) -> None:
        self._behavior = behavior
        self._rows: dict[str, _Row] = {}
        self._plans_ahead = config.scheduler.plans_ahead(on_accelerator=False)
        self._num_steps = 0
        self._num_loads = 0
        self._loads_due: dict[int, list[int]] = {}
        """Load ids by the number of the step that reports them."""
        wanted_len = config.model.max_model_len or behavior.max_model_len
        self.info = ModelInfo(
            num_gpu_blocks=config.cache.num_gpu_blocks_override or behavior.num_gpu_blocks,
            max_model_len=min(wanted_len, behavior.max_model_len),
            vocab_size=behavior.vocab_size,
            dtype="float32",
            num_host_blocks=config.cache.num_host_blocks(BYTES_PER_BLOCK),
            disk_level=_disk_level(config.cache),
            media=behavior.media,
        )

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self._plans_ahead else 1

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Run a step; with async scheduling as late as possible, when its output is awaited."""
        return _LateStep(self, plan) if self._plans_ahead else FinishedOutput(self.run(plan))

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._inject_faults()
        self._take_in(plan)
        computed = self._num_computed_tokens(plan)
        req_ids = list(plan.num_scheduled_tokens)
        forbidden = _by_request(plan.masks.result()) if plan.masks is not None else {}
        sampled: list[list[int]] = []
        logprobs: dict[str, list[TokenLogprobs]] = {}
        for req_id, num_new in plan.num_scheduled_tokens.items():
            row = self._rows[req_id]
            assert computed[req_id] + num_new <= row.num_tokens, "more scheduled than there is"
            if computed[req_id] + num_new < row.num_tokens:
                sampled.append([])
                continue
            token = self._sample(req_id, row, forbidden.get(req_id))
            sampled.append([token])
            if row.params.logprobs is not None:
                logprobs[req_id] = [_certain(token, row.params.logprobs, self.info.vocab_size)]
        finished, failed = self._loads_reported(plan)
        return ModelRunnerOutput(req_ids, sampled, logprobs, finished, failed, plan.kv_disk_writes.disk_slots)

    def _loads_reported(self, plan: SchedulerOutput) -> tuple[list[int], list[int]]:
        """Ids of the loads that finish in this step and of those that fail in it."""
        behavior = self._behavior
        if plan.kv_loads:
            due = self._num_steps + behavior.load_steps - 1
            self._loads_due.setdefault(due, []).extend(load.load_id for load in plan.kv_loads)
        reported = self._loads_due.pop(self._num_steps, [])
        first = self._num_loads + 1
        self._num_loads += len(reported)
        failed = [i for number, i in enumerate(reported, start=first) if number == behavior.fail_load]
        return [load_id for load_id in reported if load_id not in failed], failed

    def _inject_faults(self) -> None:
        self._num_steps += 1
        behavior = self._behavior
        if behavior.gate is not None:
            behavior.gate.read_bytes()
        if self._num_steps == behavior.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._num_steps == behavior.raise_at_step:
            raise RuntimeError("the fake executor was told to fail")

    def _take_in(self, plan: SchedulerOutput) -> None:
        for req_id in plan.finished_req_ids:
            self._rows.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            num_tokens = len(new.prompt_token_ids)
            self._rows[new.req_id] = _Row(new.sampling_params, num_tokens, num_tokens)
        for req_id, token_ids in plan.scheduled_cached_reqs.resumed_token_ids.items():
            assert self._rows[req_id].num_tokens == len(token_ids), "an output was lost"

    @staticmethod
    def _num_computed_tokens(plan: SchedulerOutput) -> dict[str, int]:
        cached = plan.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update({new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs})
        return computed

    def _sample(self, req_id: str, row: _Row, forbidden: npt.NDArray[np.bool_] | None) -> int:
        """The token for this position, or the next one that the grammar allows."""
        position = row.num_tokens - row.num_prompt_tokens
        row.num_tokens += 1
        replay = row.params.replay_token_ids
        if replay is not None and position < len(replay):
            return replay[position]
        token = fake_token(req_id, position, self.info.vocab_size)
        if forbidden is None:
            return token
        return (token + int(np.argmin(np.roll(forbidden, -token)))) % len(forbidden)

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Never called: this executor fails in steps only."""

    def on_wave(self, callback: Callable[[int], None]) -> None:
        """Never called: it has no experts."""

    def call_worker(self, method: str, *args: Any) -> None:
        """Do nothing: it has no weights."""

    def shutdown(self) -> None:
        self._rows.clear()


def _disk_level(cache: CacheConfig) -> DiskLevel | None:
    """A disk tier that is faster than any model and accepts every write."""
    num_blocks = cache.num_disk_blocks(BYTES_PER_BLOCK)
    if not num_blocks:
        return None
    return DiskLevel(
        num_blocks=num_blocks,
        max_writes=num_blocks,
        fixed_tokens=float(cache.kv_offloading_disk_min_tokens or 0),
    )


def _by_request(masks: TokenMasks) -> dict[str, npt.NDArray[np.bool_]]:
    return dict(zip(masks.req_ids, masks.forbidden, strict=True))


def _certain(token_id: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """Log-probabilities in which the token itself ranks first, followed by the next ids."""
    top = [(token_id + offset) % vocab_size for offset in range(num_top)]
    return TokenLogprobs([token_id, *top], [0.0, *(-float(offset) for offset in range(num_top))], 1)
