"""The encoder of pictures: transformers' own vision tower, with the folder's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.media.picture_folder import PictureFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Picture = npt.NDArray[np.uint8]
"""[height, width, 3], in RGB order."""


class VisionTower(ABC):
    """Encodes pictures."""

    def __init__(self, module: PreTrainedModel, folder: PictureFolder, device: torch.device) -> None:
        self.model = folder.model
        self._module: Any = module.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._folder = folder
        self._device = device
        self._mean = torch.tensor(folder.mean, device=device).view(3, 1, 1)
        self._deviation = torch.tensor(folder.deviation, device=device).view(3, 1, 1)

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """The decoder's inputs in place of each picture's tokens: [num_embeddings, hidden_size * (1 + n)],
        its embeddings, row by row, and the additions to the outputs of the first n layers (n is 0 except for
        Qwen3-VL)."""
        return self._encode([self._colors(picture) for picture in pictures])

    @abstractmethod
    def _encode(self, colors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Like ``encode``, for scaled colors, [3, height, width] each."""

    def _colors(self, picture: Picture) -> torch.Tensor:
        colors = torch.from_numpy(picture).to(self._device).permute(2, 0, 1).float()
        return (colors * self._folder.scale - self._mean) / self._deviation


class PatchTower(VisionTower):
    """Qwen's tower, which takes the patches of all pictures, in a special order."""

    def _encode(self, colors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        size = self.model.patch_size
        merge = self.model.merge_size
        grids = torch.tensor([[1, each.shape[1] // size, each.shape[2] // size] for each in colors])
        patches = torch.cat([self.patches(each) for each in colors]).to(self._module.dtype)
        output: Any = self._module(patches, grid_thw=grids.to(self._device), return_dict=True)
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return list(torch.split(torch.cat(parts, dim=-1), (grids.prod(-1) // merge**2).tolist()))

    def patches(self, colors: torch.Tensor) -> torch.Tensor:
        """The patches of a picture [3, height, width] in the tower's order, squares of neighbors together:
        [num_patches, 3 * temporal_patch_size * patch_size^2]"""
        frames = self._folder.temporal_patch_size
        size = self.model.patch_size
        merge = self.model.merge_size
        rows = colors.shape[1] // size
        columns = colors.shape[2] // size
        squares = colors.view(3, rows // merge, merge, size, columns // merge, merge, size)
        ordered = squares.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return ordered.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(rows * columns, -1)


class WholeTower(VisionTower):
    """A whole transformers model without its decoder: a tower and a projector, picture by picture."""

    def _encode(self, colors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._one(each) for each in colors]

    def _one(self, colors: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([colors.shape[1:]], device=self._device)
        pixels = colors[None].to(self._module.dtype)
        output: Any = self._module.get_image_features(pixels, image_sizes=sizes, return_dict=True)
        features: torch.Tensor = output.pooler_output[0]
        return features
