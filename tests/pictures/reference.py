"""transformers' own models and processors of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor

from engine.records.messages import MediaSpan
from tests.pictures.picture_folders import FACTOR, Picture
from tests.worker.generation import continued
from tests.worker.loading.multimodal_folders import code_of


class PictureReference:
    """transformers' model of a folder, and its processor for pictures that have their final size."""

    def __init__(self, folder: Path) -> None:
        self.model = code_of(folder).from_pretrained(folder)
        self.has_kinds = self.model.config.model_type not in ("mistral3", "llava")
        processors: Any = AutoImageProcessor
        self.processor = processors.from_pretrained(folder, backend="pil")

    def processed(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Patches and grids of the pictures."""
        own = {} if self.has_kinds else {"patch_size": FACTOR}
        return dict(self.processor(images=list(pictures), do_resize=False, return_tensors="pt", **own))

    def greedy(
        self, prompt: list[int], media: Sequence[MediaSpan], pictures: Sequence[Picture], max_tokens: int
    ) -> list[int]:
        inputs = self.processed(pictures) if pictures else {}
        if self.has_kinds:
            inputs["mm_token_type_ids"] = torch.zeros(1, len(prompt), dtype=torch.int)
            for span in media:
                inputs["mm_token_type_ids"][0, span.offset : span.end] = 1
        return continued(self.model, prompt, max_tokens, **inputs)
