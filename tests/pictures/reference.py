"""transformers' own models and processors of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor

from engine.records.messages import MediaSpan
from tests.pictures.picture_folders import FACTOR, Picture
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
        input_ids = torch.tensor([prompt])
        inputs = self.processed(pictures) if pictures else {}
        if self.has_kinds:
            inputs["mm_token_type_ids"] = torch.zeros(1, len(prompt), dtype=torch.int)
            for span in media:
                inputs["mm_token_type_ids"][0, span.offset : span.end] = 1
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens
