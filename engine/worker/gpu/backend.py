"""The GPU backend: assembles model, attention, batch, sampler and CUDA graphs over one KV pool."""

from __future__ import annotations

import logging
from functools import partial

import torch

from engine.config.engine_config import EngineConfig
from engine.config.parallel import cores_sharing_experts
from engine.worker.attention.layer_places import LayerPlaces, num_groups
from engine.worker.attention.mixed_heads import over_pool
from engine.worker.gpu.device_batch import DeviceBatch
from engine.worker.gpu.device_rank_sampler import select_device_sampler
from engine.worker.gpu.device_runner import DeviceModelRunner
from engine.worker.gpu.forward import Forward
from engine.worker.gpu.fused_decoder import with_fused_steps
from engine.worker.gpu.graph_sizes import MOST_VERIFIED_TOKENS, GraphSizes
from engine.worker.gpu.ops import select_ops
from engine.worker.gpu.prompt_attention import select_prompt_attention
from engine.worker.gpu.sampling_ops import select_sampling_ops
from engine.worker.gpu.streams import streams_of
from engine.worker.gpu.triton_paged import TritonPagedAttention
from engine.worker.gpu.waitless import group_experts, never_waits
from engine.worker.gpu.warm_up import run_warm_up
from engine.worker.kv_tiers.host_pool import HostTransfers
from engine.worker.loading.loader import LoadedModel
from engine.worker.media.beside import open_step_media
from engine.worker.models.decoder import Decoder
from engine.worker.parallel.group import TensorParallelGroup

logger = logging.getLogger(__name__)


class GPUBackend:
    """Computes steps on one device, over one KV pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: torch.Tensor,
        places: LayerPlaces,
        config: EngineConfig,
        group: TensorParallelGroup,
    ) -> None:
        device = loaded.device
        limits = config.scheduler
        max_model_len = loaded.max_model_len
        self._limits = limits
        self._max_model_len = max_model_len
        self._streams = streams_of(device)
        kv_scale = config.cache.kv_cache_scale
        has_values = loaded.model.num_kv_vectors > 1

        def open_attention(pool: torch.Tensor, places: LayerPlaces) -> TritonPagedAttention:
            choose = partial(select_prompt_attention, pool, loaded.dtype, max_model_len, kv_scale)
            return TritonPagedAttention(pool, kv_scale, choose if has_values else None, places)

        ops = select_ops(device)
        group_experts(loaded.model, ops)
        self.attention = over_pool(pool, places, open_attention)
        self._sizes = sizes = _graph_sizes(loaded, config)
        self._sampler = select_device_sampler(
            config.model.seed, loaded.vocab_size, select_sampling_ops(device), self._streams, group
        )
        self._batch = DeviceBatch(
            limits,
            max_model_len,
            config.cache.block_size,
            sizes,
            self._sampler,
            device,
            self._streams,
            num_groups(places),
            samples=group.stage.is_last,
            prefix_groups=() if config.model.disable_cascade_attn else _prefix_groups(loaded, places),
        )
        self._batch.media = self._media = open_step_media(loaded.towers, loaded.model)
        model = loaded.model
        if isinstance(self.attention, TritonPagedAttention):
            model = with_fused_steps(model, self.attention, ops, max_model_len)
        decoder = loaded.model if isinstance(loaded.model, Decoder) else None
        self._forward = Forward(model, self.attention, self._batch, sizes, self._streams, decoder)

    def warm_up(self) -> None:
        """Run warm-up steps of all kinds; the contents of the pool do not change."""
        if self._media is not None:
            self._media.warm_up()
        run_warm_up(
            self._forward,
            self._batch,
            self._sampler,
            self._limits,
            self._max_model_len,
            self._sizes.verified_len,
        )

    def capture(self) -> None:
        """Capture the CUDA graphs."""
        self._forward.capture()

    def runner(self, host_pool: HostTransfers | None) -> DeviceModelRunner:
        num_graphs = len(self._forward.graphs) + len(self._forward.prefix_graphs)
        logger.info("Captured %d CUDA graphs.", num_graphs)
        return DeviceModelRunner(self._forward, self._batch, self._sampler, self._streams, host_pool)


def _prefix_groups(loaded: LoadedModel, places: LayerPlaces) -> list[int]:
    """The KV cache groups with layers that see all tokens; none for latents, which have no prefix pass."""
    model = loaded.model
    kinds = zip(places, model.windows, model.chunks, strict=True)
    groups = {place.group for place, window, chunk in kinds if window is None and chunk is None}
    if model.num_kv_vectors == 1 or not groups:
        logger.warning("Cascade attention is off: no layer of this model attends to all keys and values.")
        return []
    return sorted(groups)


def _graph_sizes(loaded: LoadedModel, config: EngineConfig) -> GraphSizes:
    """The sizes of the CUDA graphs. None are captured on a CPU, which has no launches to save, for models
    whose steps make the host wait, for pipeline stages, which communicate between their layers and others',
    or where cores share experts, so that each step has the tokens of all."""
    drafts = config.speculative
    limits = config.scheduler
    verified_len = 1 if drafts is None else 1 + drafts.num_speculative_tokens
    is_part = config.model.pipeline_parallel_size > 1 or cores_sharing_experts(config) > 1
    if is_part or config.model.enforce_eager or loaded.device.type != "cuda" or not never_waits(loaded.model):
        return GraphSizes((), verified_len)
    max_num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    max_tokens = min(MOST_VERIFIED_TOKENS, limits.max_num_batched_tokens)
    return GraphSizes.up_to(max_num_seqs, verified_len, max_tokens)
