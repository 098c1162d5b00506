"""An Executor for models whose tokens attend to all others: there is no KV, and each prompt is one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.config.engine_config import EngineConfig
from engine.core.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput
from engine.errors import ConfigError, EngineError, RequestError
from engine.executor import FinishedOutput, ModelInfo, PendingOutput
from engine.records.pooling import Pooled, PoolingParams, PoolingTask
from engine.records.row_failures import NOT_NUMBERS, processing_failed
from engine.worker.pooling.encoder import Encoder, EncoderPrompt
from engine.worker.pooling.loading import check_beside, is_causal, pooling_model
from engine.worker.pooling.pooling_folder import PoolingFolder, read_pooling_folder
from engine.worker.pooling.pooling_runner import PLACEHOLDER


def encoder_executor(config: EngineConfig) -> EncoderExecutor | None:
    """An executor if the model is an encoder; None if another executor runs it."""
    folder = read_pooling_folder(config.model.model, config.pooling)
    if folder is None or is_causal(config, folder):
        return None
    return EncoderExecutor(config, folder)


class EncoderExecutor:
    """Runs an encoder in the core's process."""

    max_concurrent_batches = 1

    def __init__(self, config: EngineConfig, folder: PoolingFolder) -> None:
        """Load the model. Raises ModelLoadError or ConfigError with a one-sentence message."""
        check_beside(config)
        if config.lora is not None:
            raise ConfigError("enable_lora is not supported for an encoder: adapters need native code.")
        if folder.head_rows:
            raise ConfigError(f"{folder.folder} scores by logits of tokens, which needs native code.")
        if config.cache.has_host_tier:
            raise ConfigError("kv_offloading_size is not supported for an encoder: it has no KV.")
        self._encoder = encoder = Encoder(config, folder)
        tasks: tuple[PoolingTask, ...] = ("classify",) if folder.classifies else ("embed", "token_embed")
        self._info = ModelInfo(
            num_gpu_blocks=_num_blocks(config, encoder.max_model_len),
            max_model_len=encoder.max_model_len,
            vocab_size=encoder.vocab_size,
            dtype=str(encoder.dtype).removeprefix("torch."),
            pooling=pooling_model(
                folder,
                tasks,
                encoder.size,
                whole_prompts=True,
                caches_prefixes=False,
                tells_segments=encoder.tells_segments,
            ),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        return FinishedOutput(self._run(plan))

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        """Does nothing: this executor fails only in steps, which raise."""

    def on_wave(self, told: Callable[[int], None]) -> None:
        """Does nothing: there are no experts."""

    def call_worker(self, method: str, *args: Any) -> Any:
        raise RequestError("An encoder cannot sleep or take other weights yet.", "method")

    def shutdown(self) -> None:
        torch.cuda.empty_cache()

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Every prompt is whole, so each request takes one step and is never resumed."""
        new = plan.scheduled_new_reqs
        assert len(new) == len(plan.num_scheduled_tokens), "a prompt is one step"
        if not new:
            return EMPTY_MODEL_RUNNER_OUTPUT
        asked = [each.pooling or PoolingParams() for each in new]
        prompts = [
            EncoderPrompt(each.prompt_token_ids, params.first_segment)
            for each, params in zip(new, asked, strict=True)
        ]
        pooled: dict[str, Pooled] = {}
        failed: dict[str, str] = {}
        for request, params, rows in zip(new, asked, self._encoder.run(prompts), strict=True):
            try:
                answer = self._pooled(rows, params)
            except Exception as error:  # only this request fails
                failed[request.req_id] = processing_failed("The pooling", error)
                continue
            if np.isfinite(answer.array()).all():
                pooled[request.req_id] = answer
            else:
                failed[request.req_id] = NOT_NUMBERS
        req_ids = [request.req_id for request in new]
        result = ModelRunnerOutput(req_ids, [[PLACEHOLDER] for _ in req_ids], failed=failed)
        result.pooled = pooled
        return result

    def _pooled(self, rows: torch.Tensor, params: PoolingParams) -> Pooled:
        pooler = self._encoder.pooler
        return pooler.activated(rows.float(), params) if rows.dim() == 1 else pooler.pool(rows, params)


def _num_blocks(config: EngineConfig, max_model_len: int) -> int:
    """Blocks for the most tokens of a step: the scheduler counts them, but they hold nothing."""
    num_tokens = max(config.scheduler.max_num_batched_tokens, max_model_len)
    return 1 + -(-num_tokens // config.cache.block_size) + config.scheduler.max_num_seqs
