"""Loads a head: the layer for multi-token prediction in the model's own folder, or an EAGLE head from a
separate folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_experts import packed_experts
from engine.worker.cpu.packed_weights import compiled_gemm, interleaved_linear
from engine.worker.drafts.heads import (
    NAMES_APART,
    DraftHead,
    Eagle3Head,
    EagleHead,
    PredictionHead,
    names_in_layer,
)
from engine.worker.loading.checked_parts import check_parts
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.load_plan import LoadPlan
from engine.worker.loading.loader import LoadedModel
from engine.worker.loading.model_folder import read_config, read_format, resolve_folder
from engine.worker.models.builder import Builder
from engine.worker.models.decoder import Decoder
from engine.worker.models.families.table import decoder_shape, is_native
from engine.worker.models.linears import replace_modules
from engine.worker.models.mixers.latent_attention import LatentAttention
from engine.worker.models.moe import Experts
from engine.worker.models.rotary import RotaryEmbedding
from engine.worker.models.shape import DecoderShape, DenseShape
from engine.worker.parallel.group import ALONE

_HIDDEN_NORM = "layers.0.hidden_norm.weight"
"""A tensor that only EAGLE-3's heads have."""
_LEFT_OUT = ("embed_tokens.weight", "t2d")
"""Unused tensors: the head uses the model's embedding, and ``d2t`` already maps its tokens to the model's."""


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, and what it needs to run."""

    head: DraftHead
    shape: DecoderShape
    """The shape of its layer."""
    rope: RotaryEmbedding
    tapped_layers: tuple[int, ...] = ()
    """Layers of the model whose inputs the head reads; if empty, it reads the output of the final norm."""


def load_prediction_head(options: ModelConfig, target: LoadedModel, model: Decoder) -> LoadedHead:
    """Load the first layer for multi-token prediction from the folder of the model that ``options`` name.
    Raises ModelLoadError with a one-sentence message."""
    folder = resolve_folder(options.model)
    plan = LoadPlan(options, folder, model.config, target.device, target.dtype, read_format(folder))
    checkpoint = plan.decoder_checkpoint()
    names = names_in_layer(model.num_layers) if model.shape.num_unused_layers else NAMES_APART
    if names.fuse not in checkpoint.tensors:
        raise ModelLoadError(f"{folder} has no layer for multi-token prediction ({names.fuse}).")
    shape = _last_layer(model.shape)
    build = Builder(target.dtype, ALONE)
    head = PredictionHead(shape, build, names=names, fused=model.has_fused_experts)
    _fill(head, checkpoint, plan, shape.head_dim)
    return LoadedHead(head, shape, model.rotary)


def _last_layer(shape: DecoderShape) -> DecoderShape:
    """The shape of a decoder that has only the last of its layers, with full attention."""
    return replace(shape, mlps=shape.mlps[-1:], windows=(None,), chunks=(), states=(), rope_kinds=())


def load_eagle_head(
    name: str, method: str, options: ModelConfig, target: LoadedModel, model: Decoder
) -> LoadedHead:
    """Load an EAGLE head of the kind ``method`` for the model that ``options`` name. Raises ModelLoadError
    with a one-sentence message."""
    folder = resolve_folder(name)
    config: Any = read_config(folder, options.trust_remote_code)
    shape = _checked_shape(config, model.shape, folder)
    plan = LoadPlan(options, folder, config, target.device, target.dtype)
    checkpoint = Checkpoint(folder, plan.weights_name, read_format(folder), _own_name)
    if "fc.weight" not in checkpoint.tensors:
        raise ModelLoadError(f"{folder} holds no EAGLE head: there is no tensor fc.weight.")
    kind = "eagle3" if _HIDDEN_NORM in checkpoint.tensors else "eagle"
    if kind != method:
        raise ModelLoadError(f"{folder} holds a head of another kind: the method is {kind}, not {method}.")
    build = Builder(target.dtype, ALONE)
    layers: tuple[int, ...] = ()
    head: DraftHead
    if kind == "eagle3":
        layers = _tapped_layers(config, model.num_layers)
        head = _eagle3(shape, build, checkpoint, config, len(layers))
    else:
        head = EagleHead(shape, build, bias="fc.bias" in checkpoint.tensors)
    _check_unused(checkpoint, head, folder)
    _fill(head, checkpoint, plan, shape.head_dim)
    rope = RotaryEmbedding(config, shape.rotary_dim or shape.head_dim, target.device)
    return LoadedHead(head, shape, rope, layers)


def _checked_shape(config: Any, of_model: DecoderShape, folder: Path) -> DecoderShape:
    """The shape of the head's layer. ModelLoadError if it is unsupported, or does not fit this model."""
    shape = decoder_shape(config) if is_native(config) else None
    if shape is None or shape.num_layers != 1 or not isinstance(shape.mlps[0], DenseShape):
        raise ModelLoadError(f"{folder} holds no supported EAGLE head: it must be one Llama layer.")
    if shape.windows != (None,) or not shape.is_compiled:
        raise ModelLoadError(f"{folder} cannot draft: its layer has no full attention.")
    if shape.hidden_size != of_model.hidden_size:
        raise ModelLoadError(
            f"{folder} reads hidden states of {shape.hidden_size} numbers, and the model's have "
            f"{of_model.hidden_size}."
        )
    return replace(shape, vocab_size=of_model.vocab_size)


def _tapped_layers(config: Any, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads: those that its config names, or else the published ones:
    an early, a middle and a late one."""
    named: Sequence[int] | None = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    if named is None:
        named = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    if not all(0 <= layer < num_layers for layer in layers) or len(set(layers)) < len(layers):
        raise ModelLoadError(f"The EAGLE head reads layers {list(layers)} of a model that has {num_layers}.")
    return layers


def _eagle3(
    shape: DecoderShape, build: Builder, checkpoint: Checkpoint, config: Any, num_layers: int
) -> Eagle3Head:
    lm_head = checkpoint.tensors.get("lm_head.weight")
    return Eagle3Head(
        shape,
        build,
        num_layers=num_layers,
        vocab_size=None if lm_head is None else lm_head.shape[0],
        has_offsets="d2t" in checkpoint.tensors,
        norm_before_residual=bool(getattr(config, "norm_before_residual", False)),
    )


def _own_name(name: str) -> str | None:
    """The name in ``heads`` of a tensor of an EAGLE folder; None for a tensor that is not used."""
    name = name.removeprefix("model.")
    if name in _LEFT_OUT or name.endswith("rotary_emb.inv_freq"):
        return None
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _check_unused(checkpoint: Checkpoint, head: DraftHead, folder: Path) -> None:
    """Raise ModelLoadError if there are tensors that this head would not use."""
    others = checkpoint.tensors.keys() - head.checkpoint_parts().keys() - {"lm_head.weight"}
    if others:
        raise ModelLoadError(f"{folder} holds tensor {min(others)}, which no supported EAGLE head uses.")


def _fill(head: DraftHead, checkpoint: Checkpoint, plan: LoadPlan, head_dim: int) -> None:
    """Allocate and load the head's parameters, and pack them for a CPU like the model's. ``head_dim``: of its
    attention."""
    assert isinstance(head, nn.Module)
    check_parts(checkpoint, head.checkpoint_parts(), "the head", plan.folder)
    head._apply(  # type: ignore[no-untyped-call]
        lambda each: torch.empty(each.shape, dtype=each.dtype, device=plan.device)
    )
    head.requires_grad_(False)
    with torch.inference_mode():
        checkpoint.fill(head.checkpoint_parts())
        for module in list(head.modules()):
            if isinstance(module, LatentAttention):
                module.split_maps()
        if plan.options.attention_backend == "auto":
            _pack(head, compiled_gemm(head_dim, plan.device, plan.dtype))


def _pack(head: nn.Module, gemm: CompiledGemm | None) -> None:
    if gemm is not None:
        replace_modules(head, nn.Linear, partial(interleaved_linear, gemm=gemm))
        replace_modules(head, Experts, partial(packed_experts, gemm=gemm))
