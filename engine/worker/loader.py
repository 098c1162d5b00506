"""Loads a model folder into a CausalModel: our decoder where it fits, transformers' own otherwise.

All that can be wrong with a folder is found from its headers, before memory is spent.
Knows nothing of the KV pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.worker.checkpoint import Checkpoint
from engine.worker.memory import as_gib, available_bytes
from engine.worker.model_folder import (
    check_rope,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    read_config,
    resolve_folder,
)
from engine.worker.models.base import CausalModel, architecture_of
from engine.worker.models.decoder import Decoder, is_native
from engine.worker.models.transformers_model import TransformersModel

LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its folder said about it."""

    model: CausalModel
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """All decisions before the first byte of a weight is read."""

    options: ModelConfig
    folder: Path
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def dummy(self) -> bool:
        return self.options.load_format == "dummy"

    @property
    def architecture(self) -> str:
        return architecture_of(self.config)


def load_model(options: ModelConfig) -> LoadedModel:
    """Load the model that ``options`` names. Raises ModelLoadError or ConfigError with one sentence."""
    if options.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {options.load_format!r}."
        )
    if options.model_impl not in MODEL_IMPLEMENTATIONS:
        raise ConfigError(
            f"model_impl must be one of {', '.join(MODEL_IMPLEMENTATIONS)}, got {options.model_impl!r}."
        )
    device = choose_device(options.device)
    folder = resolve_folder(options.model)
    config = read_config(folder, options.trust_remote_code)
    max_model_len = choose_max_model_len(options, config)
    check_rope(config, max_model_len)
    plan = _Plan(options, folder, config, device, choose_dtype(options.dtype, config))
    model = _load_native(plan) if _wants_native(plan) else _load_transformers(plan)
    vocab_size: int = config.get_text_config(decoder=True).vocab_size
    return LoadedModel(model, device, plan.dtype, max_model_len, vocab_size)


def _wants_native(plan: _Plan) -> bool:
    fits = is_native(plan.config)
    if plan.options.model_impl == "native" and not fits:
        raise ModelLoadError(
            f"Architecture {plan.architecture!r} with this config has no native implementation; "
            "set model_impl to auto."
        )
    return fits and plan.options.model_impl != "transformers"


def _load_native(plan: _Plan) -> CausalModel:
    model = Decoder(plan.config, plan.dtype)
    checkpoint = None if plan.dummy else Checkpoint(plan.folder)
    if checkpoint is not None:
        _check_tensors(checkpoint, model.checkpoint_views(), plan)
    _check_memory(model, plan)
    model.materialize(plan.device)
    with torch.inference_mode():
        _fill(model.checkpoint_views(), checkpoint, plan)
        model.finish_loading()
    return model


def _fill(views: Mapping[str, torch.Tensor], checkpoint: Checkpoint | None, plan: _Plan) -> None:
    if checkpoint is None:
        _fill_with_noise(views, plan)
        return
    for name, tensor in checkpoint.tensors():
        if name in views:
            views[name].copy_(tensor)


def _check_tensors(checkpoint: Checkpoint, views: Mapping[str, torch.Tensor], plan: _Plan) -> None:
    """Every tensor that the architecture has is there in its shape, and no other."""
    for name, view in views.items():
        entry = checkpoint.entries.get(name)
        if entry is None:
            raise ModelLoadError(f"Tensor {name} of {plan.architecture} is missing from {plan.folder}.")
        if entry.shape != tuple(view.shape):
            raise ModelLoadError(
                f"Tensor {name} in {entry.file} has shape {list(entry.shape)}, "
                f"but {plan.architecture} needs {list(view.shape)}."
            )
    for name in checkpoint.entries.keys() - views.keys():
        # Tied models may carry a copy of the embedding, old checkpoints their rope frequencies.
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ModelLoadError(
                f"{plan.folder} holds tensor {name}, which {plan.architecture} has no use for."
            )


def _check_memory(model: torch.nn.Module, plan: _Plan) -> None:
    needed = sum(parameter.numel() for parameter in model.parameters()) * plan.dtype.itemsize
    available = available_bytes(plan.device)
    if needed > available:
        raise ModelLoadError(
            f"The weights of {plan.architecture} need {as_gib(needed)} of memory on {plan.device.type}, "
            f"but only {as_gib(available)} are available."
        )


def _fill_with_noise(views: Mapping[str, torch.Tensor], plan: _Plan) -> None:
    """Random weights that keep the scale of what passes through them."""
    generator = torch.Generator(plan.device).manual_seed(plan.options.seed)
    for view in views.values():
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, view.shape[-1] ** -0.5, generator=generator)


def _load_transformers(plan: _Plan) -> CausalModel:
    model = TransformersModel(plan.config, plan.dtype, plan.options.trust_remote_code)
    if not plan.dummy:
        Checkpoint(plan.folder)
    _check_memory(model.skeleton, plan)
    with _no_progress_bars():
        loaded = _random_transformers(plan, model) if plan.dummy else _pretrained(plan, model)
    model.attach(loaded.to(plan.device))  # type: ignore[arg-type]
    return model


def _pretrained(plan: _Plan, model: TransformersModel) -> PreTrainedModel:
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            plan.folder,
            config=plan.config,
            dtype=plan.dtype,
            attn_implementation=model.attention_name,
            trust_remote_code=plan.options.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that the report names them, instead of a page of traceback
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"{plan.folder} could not be loaded as {plan.architecture}: {reason}") from error
    loaded, report = result
    for name in sorted(report["missing_keys"]):
        raise ModelLoadError(f"Tensor {name} of {plan.architecture} is missing from {plan.folder}.")
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"Tensor {name} in {plan.folder} has shape {list(found)}, "
            f"but {plan.architecture} needs {list(needed)}."
        )
    assert isinstance(loaded, PreTrainedModel)
    return loaded


def _random_transformers(plan: _Plan, model: TransformersModel) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.options.seed)
        loaded: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            plan.config,
            dtype=plan.dtype,
            attn_implementation=model.attention_name,
            trust_remote_code=plan.options.trust_remote_code,
        )
    return loaded


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' own bars off the terminal: it belongs to the front end."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
