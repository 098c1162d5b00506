"""The encoder of pictures: transformers' own vision tower, with the weights of the folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
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
from engine.worker.pictures.folder import PictureFolder

Picture = npt.NDArray[np.uint8]
"""[height, width, 3], red first."""

_TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
}
"""The class of each model type in transformers."""


class VisionTower:
    """Encodes pictures."""

    def __init__(self, module: PreTrainedModel, folder: PictureFolder, device: torch.device) -> None:
        self.model = folder.model
        self._module = module.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._folder = folder
        self._device = device
        self._scale = torch.tensor(folder.scale, device=device)
        self._mean = torch.tensor(folder.mean, device=device).view(3, 1, 1)
        self._deviation = torch.tensor(folder.deviation, device=device).view(3, 1, 1)

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """What the decoder reads in place of each picture's tokens: [num_tokens, hidden_size * (1 + n)], its
        embeddings and what is added to the outputs of the first n layers (n is 0 but for Qwen3-VL)."""
        model = self._folder.model
        grids = torch.tensor([[1, *self._grid(picture)] for picture in pictures])
        patches = torch.cat([self.patches(picture) for picture in pictures]).to(self._module.dtype)
        output: Any = self._module(patches, grid_thw=grids.to(self._device), return_dict=True)
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        sizes = (grids.prod(-1) // model.merge_size**2).tolist()
        return list(torch.split(torch.cat(parts, dim=-1), sizes))

    def patches(self, picture: Picture) -> torch.Tensor:
        """The patches of a picture in the tower's order, squares of neighbors together:
        [num_patches, 3 * temporal_patch_size * patch_size^2]"""
        model, frames = self._folder.model, self._folder.temporal_patch_size
        size, merge = model.patch_size, model.merge_size
        rows, columns = self._grid(picture)
        colors = torch.from_numpy(picture).to(self._device).permute(2, 0, 1).float()
        colors = (colors * self._scale - self._mean) / self._deviation
        squares = colors.view(3, rows // merge, merge, size, columns // merge, merge, size)
        ordered = squares.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return ordered.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(rows * columns, -1)

    def _grid(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of patches."""
        size = self._folder.model.patch_size
        return picture.shape[0] // size, picture.shape[1] // size


def load_tower(plan: LoadPlan, folder: PictureFolder, decoder: Decoder) -> VisionTower:
    """Load the tower of a folder beside its decoder. Raises ModelLoadError."""
    hidden_size = decoder.shape.hidden_size
    if decoder.rotary.axes is None:
        raise ModelLoadError(
            f"mrope_section in {plan.folder} must be three numbers, one frequency for each two of "
            f"{2 * len(decoder.rotary.frequencies)} numbers of a head."
        )
    config: Any = read_by_transformers(plan.folder, plan.options.trust_remote_code)
    vision = config.vision_config
    own: type[Any] = getattr(
        import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}"),
        _TOWERS[config.model_type],
    )
    if (size := getattr(vision, "out_hidden_size", vision.hidden_size)) != hidden_size:
        raise ModelLoadError(
            f"The vision tower of {plan.folder} makes embeddings of {size} numbers, and its decoder reads "
            f"{hidden_size}."
        )
    with torch.device("meta"):
        check_memory(own._from_config(vision), plan)
    if plan.dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.options.seed)
            module = own._from_config(vision, dtype=plan.dtype)
    else:
        module = _with_weights(own, vision, plan)
    return VisionTower(module, folder, plan.device)


def _with_weights(own: type[Any], vision: Any, plan: LoadPlan) -> PreTrainedModel:
    checkpoint = Checkpoint(plan.folder, plan.weights_name, plan.weight_format, tower_name)
    with TensorFiles() as files, no_progress_bars():
        tensors = {name: LateTensor(its, files, plan.dtype) for name, its in checkpoint.tensors.items()}
        module, report = own.from_pretrained(
            None, config=vision, state_dict=tensors, dtype=plan.dtype, output_loading_info=True
        )
    for name in sorted(report["missing_keys"]):
        raise ModelLoadError(f"Tensor {name} of the vision tower is missing from {plan.folder}.")
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"Tensor {name} of the vision tower in {plan.folder} has shape {list(found)}, but {list(needed)} "
            "is needed."
        )
    assert isinstance(module, PreTrainedModel)
    return module
