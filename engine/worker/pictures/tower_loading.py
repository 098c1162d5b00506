"""Loads the vision tower of a folder into transformers' own class."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.dequantization import LateTensor
from engine.worker.loading.formats.stored_tensor import TensorFiles
from engine.worker.loading.load_plan import LoadPlan, check_memory
from engine.worker.loading.model_folder import read_by_transformers
from engine.worker.loading.text_decoder import tower_name
from engine.worker.loading.transformers_loader import no_progress_bars
from engine.worker.models.decoder import Decoder
from engine.worker.models.rotary import have_axes
from engine.worker.pictures.folder import QWEN_TYPES, PictureFolder
from engine.worker.pictures.tower import PatchTower, VisionTower, WholeTower

_TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
    "mistral3": "Mistral3Model",
    "llava": "LlavaModel",
}
"""The class of each model type in transformers: only a tower, or a whole model."""
_DECODER = "language_model."


def load_tower(plan: LoadPlan, folder: PictureFolder, decoder: Decoder) -> VisionTower:
    """Load the vision tower of a decoder's folder. Raises ModelLoadError."""
    config: Any = read_by_transformers(plan.folder, plan.options.trust_remote_code)
    model_type = str(config.model_type)
    code = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    own: type[Any] = getattr(code, _TOWERS[model_type])
    if model_type in QWEN_TYPES:
        _check_qwen(plan, config.vision_config, decoder)
        return PatchTower(_module(own, config.vision_config, plan), folder, plan.device)
    return WholeTower(_module(own, _without_decoder(config), plan), folder, plan.device)


def _check_qwen(plan: LoadPlan, vision: Any, decoder: Decoder) -> None:
    if not have_axes(decoder.ropes.values()):
        raise ModelLoadError(
            f"mrope_section in {plan.folder} must be three numbers, one frequency for each two of "
            f"{2 * len(decoder.rotary.frequencies)} numbers of a head."
        )
    size = getattr(vision, "out_hidden_size", vision.hidden_size)
    if size != decoder.shape.hidden_size:
        raise ModelLoadError(
            f"The vision tower of {plan.folder} makes embeddings of {size} numbers, and its decoder reads "
            f"{decoder.shape.hidden_size}."
        )


def _without_decoder(config: Any) -> Any:
    """The config of a model whose decoder has no layers and almost no vocabulary."""
    small = deepcopy(config)
    text = small.text_config
    text.num_hidden_layers = 0
    text.vocab_size = 1
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return small


def _module(own: type[Any], config: Any, plan: LoadPlan) -> PreTrainedModel:
    with torch.device("meta"):
        check_memory(own._from_config(config), plan)
    if plan.dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.options.seed)
            made: PreTrainedModel = own._from_config(config, dtype=plan.dtype)
            return made
    return _with_weights(own, config, plan)


def _with_weights(own: type[Any], config: Any, plan: LoadPlan) -> PreTrainedModel:
    checkpoint = Checkpoint(plan.folder, plan.weights_name, plan.weight_format, tower_name)
    with TensorFiles() as files, no_progress_bars():
        tensors = {name: LateTensor(its, files, plan.dtype) for name, its in checkpoint.tensors.items()}
        module, report = own.from_pretrained(
            None, config=config, state_dict=tensors, dtype=plan.dtype, output_loading_info=True
        )
    for name in sorted(report["missing_keys"]):
        if not name.startswith(_DECODER):
            raise ModelLoadError(f"Tensor {name} of the vision tower is missing from {plan.folder}.")
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"Tensor {name} of the vision tower in {plan.folder} has shape {list(found)}, but {list(needed)} "
            "is needed."
        )
    assert isinstance(module, PreTrainedModel)
    return module
