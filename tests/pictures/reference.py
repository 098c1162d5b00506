"""transformers' own models and processors of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor

from engine.messages import MediaSpan
from tests.pictures.picture_folders import Picture
from tests.worker.loading.multimodal_folders import code_of


class PictureReference:
    """transformers' model of a folder, and its processor of pictures that have their size already."""

    def __init__(self, folder: Path) -> None:
        self.model = code_of(folder).from_pretrained(folder)
        processors: Any = AutoImageProcessor
        self.processor = processors.from_pretrained(folder, backend="pil")

    def processed(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Patches and grids."""
        return dict(self.processor(images=list(pictures), do_resize=False, return_tensors="pt"))

    def greedy(
        self, prompt: list[int], media: Sequence[MediaSpan], pictures: Sequence[Picture], max_tokens: int
    ) -> list[int]:
        kinds = torch.zeros(1, len(prompt), dtype=torch.int)
        for span in media:
            kinds[0, span.offset : span.end] = 1
        input_ids = torch.tensor([prompt])
        inputs = self.processed(pictures) if pictures else {}
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            mm_token_type_ids=kinds,
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens
