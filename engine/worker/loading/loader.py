"""Loads a model folder into a CausalModel: the native decoder where it fits, otherwise transformers' own.

It finds all faults of a folder from its headers, before it allocates memory.

Knows nothing of the KV pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.process.process_log import start_log
from engine.process.trim import give_back_freed
from engine.records.pooling import PoolingModel
from engine.worker.cpu.packed_weights import compiled_gemm
from engine.worker.loading.checked_parts import check_parts
from engine.worker.loading.checkpoint import Checkpoint, stored_dtype
from engine.worker.loading.dequantization import log_dequantization
from engine.worker.loading.formats.stored_tensor import PlainTensor, same_content
from engine.worker.loading.kept_weights import KeptWeights
from engine.worker.loading.load_plan import LoadPlan, check_memory
from engine.worker.loading.model_folder import (
    check_rope,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    dtype_of_dequantized,
    read_config,
    read_format,
    resolve_folder,
)
from engine.worker.loading.native_config import NativeConfig
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.media.audio_folder import read_audio_folder
from engine.worker.media.picture_folder import read_picture_folder
from engine.worker.media.towers import Towers
from engine.worker.memory import use_huge_pages
from engine.worker.models.base import CausalModel, cannot_be_served
from engine.worker.models.decoder import Decoder
from engine.worker.models.families.table import MISREAD, decoder_shape, is_native
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.pooling.pooler import Pooler

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the facts from its folder that the engine needs."""

    model: CausalModel
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    pooler: Pooler | None = None
    """Computes answers from hidden states; None: the model generates."""
    pooling: PoolingModel | None = None
    """The description of a model that pools, for API servers."""
    towers: Towers | None = None
    """Encodes pictures and audio; None: the model is served as text."""


def load_model(
    options: ModelConfig, group: TensorParallelGroup = ALONE, *, headless: bool = False
) -> LoadedModel:
    """Load the model that ``options`` names, or this rank's part of it. Raises ModelLoadError or ConfigError
    with a one-sentence message. ``headless``: load a native model that returns its head's inputs."""
    if options.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {options.load_format!r}."
        )
    if options.model_impl not in MODEL_IMPLEMENTATIONS:
        raise ConfigError(
            f"model_impl must be one of {', '.join(MODEL_IMPLEMENTATIONS)}, got {options.model_impl!r}."
        )
    device = choose_device(options.device, group.local_rank, group.local_size)
    folder = resolve_folder(options.model)
    config = read_config(folder, options.trust_remote_code)
    max_model_len = choose_max_model_len(options, config)
    check_rope(config, max_model_len)
    weight_format = read_format(folder)
    dtype = choose_dtype(options.dtype, config)
    if options.dtype == "auto" and config.dtype is None and options.load_format != "dummy":
        dtype = stored_dtype(folder) or dtype
    if weight_format is not None and options.dtype == "auto":
        dtype = dtype_of_dequantized(dtype, device)
    if headless:
        config = _with_tied_head(config)
    plan = LoadPlan(options, folder, config, device, dtype, weight_format, group, headless)
    native = _wants_native(plan)
    _check_quantization(plan)
    _check_parallelism(plan, native)
    if options.enable_return_routed_experts:
        _check_experts("enable_return_routed_experts", plan, native)
    if native and not headless and group.stage.size == 1:
        audio = read_audio_folder(folder, options)
        plan = replace(plan, pictures=read_picture_folder(folder, options), audio=audio)
    model = _load_native(plan) if native else _load_by_transformers(plan)
    vocab_size: int = config.get_text_config(decoder=True).vocab_size
    return LoadedModel(model, device, plan.dtype, max_model_len, vocab_size, towers=_load_towers(plan, model))


def _with_tied_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a decoder whose head is never computed, so that loading needs none in the checkpoint."""
    own: object = config  # may be a NativeConfig
    if isinstance(own, NativeConfig):
        return cast("PreTrainedConfig", msgspec.structs.replace(own, tie_word_embeddings=True))
    config.tie_word_embeddings = True
    return config


def _wants_native(plan: LoadPlan) -> bool:
    fits = is_native(plan.config)
    if plan.options.model_impl == "native" and not fits:
        raise ModelLoadError(
            f"Architecture {plan.architecture!r} with this config has no native implementation; "
            "set model_impl to auto."
        )
    if not fits and plan.config.model_type in MISREAD:
        raise cannot_be_served(
            plan.config, "its config asks for what neither native code nor transformers' computes"
        )
    return fits and plan.options.model_impl != "transformers"


def _check_quantization(plan: LoadPlan) -> None:
    wanted = plan.options.quantization
    if wanted is None:
        return
    if plan.device.type != "cpu":
        raise ConfigError(
            f"quantization: {wanted} is supported on CPUs only, and device is {plan.device.type}."
        )


def _check_parallelism(plan: LoadPlan, native: bool) -> None:
    num_stages = plan.group.stage.size
    if num_stages > 1 and not native:
        raise ConfigError(
            f"pipeline_parallel_size: {num_stages} needs a model with a native implementation; "
            f"{plan.architecture} runs through transformers."
        )
    if plan.group.stage.size > 1 and any(decoder_shape(plan.config).states):
        raise ConfigError(
            "pipeline_parallel_size > 1 does not support models that have layers with states yet, such as "
            f"{plan.architecture}."
        )
    if plan.options.enable_expert_parallel:
        _check_experts("enable_expert_parallel", plan, native)


def _check_experts(option: str, plan: LoadPlan, native: bool) -> None:
    if not (native and decoder_shape(plan.config).is_sparse):
        raise ConfigError(
            f"{option} needs a mixture of experts with a native implementation; {plan.architecture} is not."
        )


def _load_native(plan: LoadPlan) -> CausalModel:
    by_rank = plan.options.enable_expert_parallel
    checkpoint = None if plan.dummy else plan.decoder_checkpoint()
    if checkpoint is not None and plan.multimodal:
        _take_decoder(plan, checkpoint)
    if checkpoint is not None and not plan.headless:
        plan = _with_own_head(plan, checkpoint)
    model = Decoder(plan.config, plan.dtype, plan.group, experts_by_rank=by_rank)
    model.is_headless = plan.headless
    if checkpoint is None:
        check_memory(model, plan)
        fill = _random_weights(plan)
    else:
        model.note_layout(checkpoint.tensors.keys())
        parts = model.checkpoint_parts()
        _check_tensors(checkpoint, model, parts, plan)
        kept = _kept_weights(model, checkpoint, parts, plan)
        check_memory(model, plan, 0 if kept is None else kept.saved_bytes)
        log_dequantization(plan, checkpoint, parts, kept)
        fill = checkpoint.fill if kept is None else kept.fill
    model.materialize(plan.device)
    with torch.inference_mode():
        model.load(fill, plan.options.quantization, may_compile=_may_compile(plan))
    give_back_freed()
    if plan.device.type == "cpu":
        use_huge_pages(model.buffers())
    return model


def _with_own_head(plan: LoadPlan, checkpoint: Checkpoint) -> LoadPlan:
    """Untie the head if the files hold a head that differs from the embedding, though the config ties them:
    the model was trained with that head, and transformers uses it."""
    head = checkpoint.tensors.get(_HEAD)
    embedding = checkpoint.tensors.get(_EMBEDDING)
    is_tied = getattr(plan.config, "tie_word_embeddings", False)
    if not (is_tied and isinstance(head, PlainTensor) and isinstance(embedding, PlainTensor)):
        return plan
    if same_content(head.entry, embedding.entry):
        return plan
    start_log.warning(
        "%s says tie_word_embeddings, but lm_head.weight differs from the embedding: lm_head.weight is used.",
        plan.folder,
    )
    own: object = plan.config
    if isinstance(own, NativeConfig):
        untied = cast("PreTrainedConfig", msgspec.structs.replace(own, tie_word_embeddings=False))
        return replace(plan, config=untied)
    plan.config.tie_word_embeddings = False
    return plan


def _take_decoder(plan: LoadPlan, checkpoint: Checkpoint) -> None:
    """Resolve what the config of a multimodal folder leaves open, and log what is not served."""
    if _HEAD in checkpoint.tensors:
        plan.config.tie_word_embeddings = False
    if plan.pictures is None and plan.audio is None:
        start_log.info(
            "%s is served as text: %d tensors of its other parts are left out.",
            plan.architecture,
            checkpoint.num_left_out,
        )


def _load_towers(plan: LoadPlan, model: CausalModel) -> Towers | None:
    if plan.pictures is None and plan.audio is None:
        return None
    from engine.worker.media.tower_loading import (
        load_audio_tower,
        load_vision_tower,
    )  # transformers' model code

    assert isinstance(model, Decoder), "it is native"
    return Towers(
        None if plan.pictures is None else load_vision_tower(plan, plan.pictures, model),
        None if plan.audio is None else load_audio_tower(plan, plan.audio, model),
    )


def _kept_weights(
    model: Decoder, checkpoint: Checkpoint, parts: Mapping[str, TensorPart], plan: LoadPlan
) -> KeptWeights | None:
    """The weights that stay in the checkpoint's bits; None if all are dequantized."""
    if plan.weight_format is None or plan.device.type != "cpu":
        return None
    gemm = compiled_gemm(model.head_dim, plan.device, plan.dtype) if _may_compile(plan) else None
    return KeptWeights(model, parts, checkpoint, plan.dtype, gemm)


def _may_compile(plan: LoadPlan) -> bool:
    return plan.options.attention_backend == "auto"


def _load_by_transformers(plan: LoadPlan) -> CausalModel:
    from engine.worker.loading.transformers_loader import (
        load_transformers,  # its libraries take seconds to import
    )

    return load_transformers(plan)


def _check_tensors(
    checkpoint: Checkpoint, model: Decoder, parts: Mapping[str, TensorPart], plan: LoadPlan
) -> None:
    """Check that every tensor of the architecture exists in its shape, and that there is no other."""
    check_parts(checkpoint, parts, plan.architecture, plan.folder)
    for name in checkpoint.tensors.keys() - parts.keys():
        if not model.is_unused(name) and not checkpoint.is_idle_bias(name):
            raise ModelLoadError(
                f"{plan.folder} holds tensor {name}, which {plan.architecture} does not use."
            )


def _random_weights(plan: LoadPlan) -> Callable[[Mapping[str, TensorPart]], None]:
    """Return a function that fills parameters with random weights, different on each rank, that preserve the
    scale of activations."""
    generator = torch.Generator(plan.device).manual_seed(plan.options.seed + plan.group.rank)

    def fill(parts: Mapping[str, TensorPart]) -> None:
        for part in parts.values():
            if part.view.dim() == 1:
                part.view.fill_(1.0)
            else:
                part.view.normal_(0.0, part.whole_shape[-1] ** -0.5, generator=generator)

    return fill
