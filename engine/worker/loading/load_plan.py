"""The decisions made before any weight is read. Knows no model code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.weight_format import WeightFormat
from engine.worker.loading.model_folder import is_multimodal_folder
from engine.worker.loading.text_decoder import decoder_name, headless_name, usual_names
from engine.worker.media.audio_folder import AudioFolder
from engine.worker.media.picture_folder import PictureFolder
from engine.worker.memory import as_gib, available_bytes
from engine.worker.models.base import architecture_of
from engine.worker.parallel.group import ALONE, TensorParallelGroup, sharers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All decisions made before any weight is read."""

    options: ModelConfig
    folder: Path
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    weight_format: WeightFormat | None = None
    """How the checkpoint stores weights; None: plain."""
    group: TensorParallelGroup = ALONE
    headless: bool = False
    """Whether the model runs without its head."""
    pictures: PictureFolder | None = None
    """How the model reads pictures; None: it reads none."""
    audio: AudioFolder | None = None
    """How the model reads audio; None: it reads none."""

    @property
    def dummy(self) -> bool:
        return self.options.load_format == "dummy"

    @property
    def weights_name(self) -> str | None:
        """The weight file that the config names; few configs do."""
        name = getattr(self.config, "transformers_weights", None)
        return name if isinstance(name, str) else None

    @property
    def multimodal(self) -> bool:
        """Whether the folder holds other parts in addition to the decoder."""
        return is_multimodal_folder(self.folder)

    def checkpoint(self) -> Checkpoint:
        """Read the headers of the folder's weights. Raises ModelLoadError."""
        return Checkpoint(self.folder, self.weights_name, self.weight_format)

    def decoder_checkpoint(self) -> Checkpoint:
        """Read the headers of the decoder's weights, by their names in a folder of the decoder alone. Raises
        ModelLoadError."""
        return Checkpoint(self.folder, self.weights_name, self.weight_format, self._name_of())

    def _name_of(self) -> Callable[[str], str | None] | None:
        """The function that maps a tensor's name to the decoder's; None if they are the same."""
        if self.multimodal:
            return decoder_name
        usual = usual_names(self.config.model_type)
        if not self.headless or usual is None:
            return headless_name if self.headless else usual
        return lambda name: _usual_of_headless(usual, name)

    @property
    def architecture(self) -> str:
        return architecture_of(self.config)


def _usual_of_headless(usual: Callable[[str], str], name: str) -> str | None:
    """Maps names first that are usual but for their prefix, then those that lack one."""
    whole = headless_name(usual(name))
    return None if whole is None else usual(whole)


def check_memory(model: torch.nn.Module, plan: LoadPlan, saved_bytes: int = 0) -> None:
    """Raise ModelLoadError if memory does not suffice for the parameters. ``saved_bytes``: bytes saved
    compared with the model's dtype, because some weights stay in fewer bits."""
    needed = sum(parameter.numel() for parameter in model.parameters()) * plan.dtype.itemsize - saved_bytes
    available = available_bytes(plan.device) // sharers(plan.group, plan.device)
    if needed > available:
        raise ModelLoadError(
            f"The weights of {plan.architecture} need {as_gib(needed)} of memory on {plan.device.type}, "
            f"but only {as_gib(available)} are available."
        )
