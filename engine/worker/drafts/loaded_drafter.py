"""Loads a drafter: determines what it needs of each KV block, and makes the object that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.config.speculative import SpeculativeConfig
from engine.errors import ConfigError, ModelLoadError
from engine.records.kv_cache_groups import one_group
from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.selection import select_attention
from engine.worker.cpu.compiled_decoder import with_compiled_steps
from engine.worker.cpu.input_batch import InputBatch
from engine.worker.drafts.draft_model import DraftModel, load_draft_model
from engine.worker.drafts.drafter import DraftNetwork, WorkerDrafter
from engine.worker.drafts.head_loading import load_eagle_head, load_prediction_head
from engine.worker.drafts.head_network import HeadNetwork
from engine.worker.drafts.shared_blocks import KvPool
from engine.worker.layer_groups import cache_spec
from engine.worker.loading.loader import LoadedModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.hidden_tap import HiddenTap


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter's weights, and the shape of its KV."""

    spec: KvCacheSpec
    """The shape of the drafter's part of each block."""
    open_network: Callable[[AttentionBackend], DraftNetwork]
    """Makes the network that runs over this attention."""
    num_tokens: int
    """The most tokens drafted at once."""
    max_model_len: int
    """The number of places that it can compute; it drafts no tokens after them."""
    tap: HiddenTap | None = None
    """Runs in place of the model, to capture its hidden states; None if the drafter reads none."""


@dataclass(frozen=True, slots=True)
class PlacedDrafter:
    """A drafter, and the pool that holds its KV."""

    loaded: LoadedDrafter
    pool: KvPool
    attention: str
    """The model's attention, from ``resolve_attention``."""

    @property
    def tap(self) -> HiddenTap | None:
        """See ``LoadedDrafter``."""
        return self.loaded.tap

    def put_to_work(self, batch: InputBatch) -> WorkerDrafter:
        """Make the drafter that runs. ``batch``: the rows of the model's requests."""
        loaded = self.loaded
        assert self.pool.draft_kv is not None, "the pool was opened with the drafter's spec"
        backend = select_attention(self.pool.draft_kv, self.attention, loaded.spec.places)
        network = loaded.open_network(backend)
        return WorkerDrafter(network, backend, batch, loaded.num_tokens, loaded.max_model_len)


def beside_drafter(
    config: EngineConfig, target: LoadedModel, spec: KvCacheSpec
) -> tuple[LoadedDrafter | None, KvCacheSpec]:
    """Load the drafter that the configuration names, None if it needs no weights. Also returns ``spec`` with
    the drafter's KV added to the same blocks.

    ``spec``: the model's. Raises ConfigError with a one-sentence message.
    """
    wanted = config.speculative
    if wanted is None or not wanted.has_weights:
        return None, spec
    load = _load_model if wanted.method == "draft_model" else _load_head
    try:
        if not spec.groups[0].is_full:
            raise ConfigError("the model must have a layer with full attention.")
        drafter = load(wanted, config, target, spec)
    except (ModelLoadError, ConfigError) as error:
        raise ConfigError(f"{_named(wanted)}: {error}") from error
    return drafter, replace(spec, draft_bytes_per_block=drafter.spec.kv_bytes_per_block)


def _load_model(
    wanted: SpeculativeConfig, config: EngineConfig, target: LoadedModel, spec: KvCacheSpec
) -> LoadedDrafter:
    assert wanted.model is not None, "was checked"
    drafting = load_draft_model(wanted.model, config.model)
    model = drafting.model
    return LoadedDrafter(
        cache_spec(model, one_group(model.num_layers), drafting.dtype, spec.block_size),
        lambda backend: DraftModel(
            with_compiled_steps(model, backend), drafting.vocab_size, target.vocab_size
        ),
        wanted.num_speculative_tokens,
        min(target.max_model_len, drafting.max_model_len),
    )


def _load_head(
    wanted: SpeculativeConfig, config: EngineConfig, target: LoadedModel, spec: KvCacheSpec
) -> LoadedDrafter:
    model = target.model
    if not isinstance(model, Decoder):
        raise ConfigError("the model must have a native implementation.")
    if wanted.model is None:
        loaded = load_prediction_head(config.model, target, model)
    else:
        loaded = load_eagle_head(wanted.model, wanted.method, config.model, target, model)
    shape = loaded.shape
    return LoadedDrafter(
        KvCacheSpec(
            one_group(1),
            shape.num_kv_heads,
            shape.head_dim,
            target.dtype,
            spec.block_size,
            2 if shape.latent is None else 1,
        ),
        lambda _: HeadNetwork(loaded.head, model, loaded.rope),
        wanted.num_speculative_tokens,
        target.max_model_len,
        HiddenTap(model, loaded.tapped_layers),
    )


def check_setup(wanted: SpeculativeConfig, model: ModelConfig, device: torch.device, attention: str) -> None:
    """Raise ConfigError where drafters with weights are not supported; call it before loading anything."""
    name = _named(wanted)
    if device.type != "cpu" or attention == "triton":
        raise ConfigError(f"{name} drafts on CPUs only so far, not on a GPU.")
    if wanted.method != "draft_model" and model.load_format == "dummy":
        raise ConfigError(f"{name} and load_format dummy cannot be combined.")


def _named(wanted: SpeculativeConfig) -> str:
    return f"speculative_config: method {wanted.method}"
