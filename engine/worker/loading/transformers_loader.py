"""Loads a model into transformers' own code; imported only where needed, because it takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError, ModelLoadError
from engine.worker.loading.checkpoint import Checkpoint, check_fits
from engine.worker.loading.dequantization import LateTensor, log_dequantization_of_all
from engine.worker.loading.formats.stored_tensor import TensorFiles
from engine.worker.loading.load_plan import LoadPlan, check_memory
from engine.worker.loading.model_folder import read_by_transformers
from engine.worker.memory import use_huge_pages
from engine.worker.models.base import CausalModel
from engine.worker.models.faster_modules import are_known_experts
from engine.worker.models.replacements import choose_replacements
from engine.worker.models.transformers_model import TransformersModel

logger = logging.getLogger(__name__)


def load_transformers(plan: LoadPlan) -> CausalModel:
    config = read_by_transformers(plan.folder, plan.options.trust_remote_code)
    plan = replace(plan, config=config)  # a native config cannot build the model
    model = TransformersModel(plan.config, plan.dtype, plan.options.trust_remote_code)
    checkpoint = None if plan.dummy else plan.checkpoint()
    if checkpoint is not None:
        # Old checkpoints hold unused integer buffers, and some names differ from the model's.
        parameters = {name for name, _ in model.skeleton.named_parameters()}
        checkpoint.check_types(parameters | checkpoint.float_names(), plan.dtype)
    check_memory(model.skeleton, plan)
    if plan.options.quantization is not None:
        _check_quantizable(plan, model)
    if plan.weight_format is not None and checkpoint is not None:
        log_dequantization_of_all(plan, checkpoint)
    loaded = _load(plan, model, checkpoint)
    _attach(plan, model, loaded)
    if plan.device.type == "cpu" and not _replace_modules(plan, model, loaded):
        del loaded
        model.detach()
        _attach(plan, model, _load(plan, model, checkpoint))
    return model


def _attach(plan: LoadPlan, model: TransformersModel, loaded: PreTrainedModel) -> None:
    """Attach a model, or of several ranks this one's part."""
    model.attach(loaded)
    if plan.group.size > 1:
        model.split(plan.group)


def _load(plan: LoadPlan, model: TransformersModel, checkpoint: Checkpoint | None) -> PreTrainedModel:
    with no_progress_bars(), TensorFiles() as files:
        if checkpoint is None:
            loaded = _random_transformers(plan, model)
        elif plan.weight_format is None:
            loaded = _pretrained(plan, model, plan.folder, None)
        else:
            late = {
                name: LateTensor(tensor, files, plan.dtype) for name, tensor in checkpoint.tensors.items()
            }
            loaded = _pretrained(plan, model, None, late)
    moved: PreTrainedModel = loaded.to(plan.device)  # type: ignore[arg-type]
    return moved


def _check_quantizable(plan: LoadPlan, model: TransformersModel) -> None:
    """Raise ConfigError for weights that are neither linears' nor experts' of a known kind: they would stay
    as they are."""
    for owner, module in model.skeleton.named_modules():
        others = [name for name, each in module.named_parameters(recurse=False) if each.dim() > 2]
        if isinstance(module, Conv1D):
            others = ["weight"]
        if others and not are_known_experts(module):
            raise ConfigError(
                f"quantization: {plan.options.quantization} needs a model whose weights are those of "
                f"linears, or a native implementation; {plan.architecture} has {owner}.{others[0]}."
            )


def _replace_modules(plan: LoadPlan, model: TransformersModel, loaded: PreTrainedModel) -> bool:
    """Replace linears by packed or quantized ones, and norms; returns whether the model's code runs with
    them. Raises ModelLoadError if it must, to be quantized."""
    quantization = plan.options.quantization
    may_compile = plan.options.attention_backend == "auto"
    like = torch.empty(0, dtype=plan.dtype)
    replacements = choose_replacements(loaded, model.head_dim, like, quantization, may_compile)
    try:
        model.replace_modules(replacements, quantized=quantization is not None)
    except ModelLoadError as error:
        if quantization is not None:
            raise
        logger.info("transformers' own modules are used: %s", error)
        return False
    use_huge_pages(loaded.buffers())
    return True


def _pretrained(
    plan: LoadPlan, model: TransformersModel, folder: Path | None, tensors: dict[str, LateTensor] | None
) -> PreTrainedModel:
    """Load the model from a folder, or from tensors by name."""
    loader: Any = AutoModelForCausalLM if tensors is None else type(model.skeleton)
    try:
        result: Any = loader.from_pretrained(
            folder,
            config=plan.config,
            state_dict=tensors,
            dtype=plan.dtype,
            attn_implementation=model.attention_name,
            trust_remote_code=plan.options.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the report names them, instead of a page of traceback
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
    if plan.dtype == torch.float16:
        for parameter in loaded.parameters():
            check_fits(parameter)
    return loaded


def _random_transformers(plan: LoadPlan, model: TransformersModel) -> PreTrainedModel:
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
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, as the API server uses the terminal."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
