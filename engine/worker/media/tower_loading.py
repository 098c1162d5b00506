"""Loads the encoders of a folder into transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.errors import ModelLoadError
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.dequantization import LateTensor
from engine.worker.loading.formats.stored_tensor import TensorFiles
from engine.worker.loading.load_plan import LoadPlan, check_memory
from engine.worker.loading.model_folder import read_by_transformers
from engine.worker.loading.text_decoder import audio_name, lone_audio_name, vision_name
from engine.worker.loading.transformers_loader import no_progress_bars
from engine.worker.media.audio_folder import AudioFolder
from engine.worker.media.audio_tower import (
    AudioTower,
    MaskedTower,
    OmniTower,
    PaddedOmniTower,
    PaddedTower,
    WindowTower,
)
from engine.worker.media.picture_folder import QWEN_TYPES, PictureFolder
from engine.worker.media.vision_tower import PatchTower, VisionTower, WholeTower
from engine.worker.models.decoder import Decoder
from engine.worker.models.rotary import have_axes

_TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
    "qwen2_5_omni_thinker": "Qwen2_5OmniVisionEncoder",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeVisionEncoder",
    "mistral3": "Mistral3Model",
    "llava": "LlavaModel",
}
"""The class of each model type in transformers: only a tower, or a whole model."""
_AUDIO: dict[str, tuple[str, type[AudioTower]]] = {
    "qwen2_audio": ("Qwen2AudioModel", PaddedTower),
    "voxtral": ("VoxtralModel", WindowTower),
    "gemma4": ("Gemma4Model", MaskedTower),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniAudioEncoder", PaddedOmniTower),
    "qwen3_omni_moe_thinker": ("Qwen3OmniMoeAudioEncoder", OmniTower),
}
"""The same for encoders of audio, and the tower that runs them."""
_THINKER = "_thinker"
_Rename = Callable[[str], str | None]
_DECODER = "language_model."


def load_vision_tower(plan: LoadPlan, folder: PictureFolder, decoder: Decoder) -> VisionTower:
    """Load the vision tower of a decoder's folder. Raises ModelLoadError."""
    config = _config_of(plan)
    own = _class(config.model_type, _TOWERS[config.model_type])
    if config.model_type in QWEN_TYPES:
        _check_qwen(plan, config.vision_config, decoder)
        return PatchTower(_module(own, config.vision_config, plan, vision_name), folder, plan.device)
    return WholeTower(_module(own, _without_decoder(config), plan, vision_name), folder, plan.device)


def load_audio_tower(plan: LoadPlan, folder: AudioFolder, decoder: Decoder) -> AudioTower:
    """Load the encoder of audio of a decoder's folder. Raises ModelLoadError."""
    config = _config_of(plan)
    name, tower = _AUDIO[config.model_type]
    own = _class(config.model_type, name)
    if config.model_type.endswith(_THINKER):
        module = _module(own, config.audio_config, plan, lone_audio_name)
        _check_size(plan, config.audio_config.output_dim, "encoder of audio", decoder)
    else:
        module = _module(own, _without_vision(_without_decoder(config)), plan, audio_name)
    return tower(module, folder, plan.device)


def _config_of(plan: LoadPlan) -> Any:
    """The config of what reads text and media: see ``thinker_of``."""
    config: Any = read_by_transformers(plan.folder, plan.options.trust_remote_code)
    return getattr(config, "thinker_config", config)


def _class(model_type: str, name: str) -> type[Any]:
    package = model_type.removesuffix(_THINKER)
    code = import_module(f"transformers.models.{package}.modeling_{package}")
    found: type[Any] = getattr(code, name)
    return found


def _check_qwen(plan: LoadPlan, vision: Any, decoder: Decoder) -> None:
    if not have_axes(decoder.ropes.values()):
        raise ModelLoadError(
            f"mrope_section in {plan.folder} must be three numbers, one frequency for each two of "
            f"{2 * len(decoder.rotary.frequencies)} numbers of a head."
        )
    _check_size(plan, getattr(vision, "out_hidden_size", vision.hidden_size), "vision tower", decoder)


def _check_size(plan: LoadPlan, size: int, which: str, decoder: Decoder) -> None:
    if size != decoder.shape.hidden_size:
        raise ModelLoadError(
            f"The {which} of {plan.folder} makes embeddings of {size} numbers, and its decoder reads "
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
    if getattr(text, "hidden_size_per_layer_input", None):
        text.hidden_size_per_layer_input = 0
    return small


def _without_vision(small: Any) -> Any:
    """The same config without a vision tower."""
    if getattr(small, "vision_config", None) is not None:
        small.vision_config = None
    return small


def _module(own: type[Any], config: Any, plan: LoadPlan, rename: _Rename) -> PreTrainedModel:
    with torch.device("meta"):
        check_memory(own._from_config(config), plan)
    if plan.dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.options.seed)
            made: PreTrainedModel = own._from_config(config, dtype=plan.dtype)
            return made
    return _with_weights(own, config, plan, rename)


def _with_weights(own: type[Any], config: Any, plan: LoadPlan, rename: _Rename) -> PreTrainedModel:
    checkpoint = Checkpoint(plan.folder, plan.weights_name, plan.weight_format, rename)
    with TensorFiles() as files, no_progress_bars(), _no_report():
        tensors = {name: LateTensor(its, files, plan.dtype) for name, its in checkpoint.tensors.items()}
        module, report = own.from_pretrained(
            None, config=config, state_dict=tensors, dtype=plan.dtype, output_loading_info=True
        )
    for name in sorted(report["missing_keys"]):
        if not name.startswith(_DECODER):
            raise ModelLoadError(f"Tensor {name} of an encoder is missing from {plan.folder}.")
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"Tensor {name} of an encoder in {plan.folder} has shape {list(found)}, but {list(needed)} "
            "is needed."
        )
    assert isinstance(module, PreTrainedModel)
    return module


@contextmanager
def _no_report() -> Iterator[None]:
    """Keep transformers from listing the decoder's tensors as missing."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
