"""transformers' own models and processors of audio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoFeatureExtractor

from tests.audio.audio_folders import RATE, Clip, class_of

_PADDING: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"padding": "max_length"},
    "qwen2_5_omni_thinker": {"padding": "max_length"},
    "qwen3_omni_moe_thinker": {"padding": True, "truncation": False},
}
"""What the processor of each model type passes to its feature extractor."""


class AudioReference:
    """transformers' model of a folder, and its features of clips."""

    def __init__(self, folder: Path) -> None:
        self.model_type = json.loads((folder / "config.json").read_text())["model_type"]
        self.model = class_of(self.model_type).from_pretrained(folder)
        extractors: Any = AutoFeatureExtractor
        self.extractor = extractors.from_pretrained(folder)

    def features(self, clips: Sequence[Clip]) -> dict[str, torch.Tensor]:
        """The model's inputs for the clips, each made alone."""
        if self.model_type == "voxtral":
            return {"input_features": torch.cat([self._windows(clip) for clip in clips])}
        made = [self._one(clip) for clip in clips]
        length = max(each["input_features"].shape[2] for each in made)
        pad = torch.nn.functional.pad
        return {
            "input_features": torch.cat(
                [pad(each["input_features"], (0, length - each["input_features"].shape[2])) for each in made]
            ),
            "feature_attention_mask": torch.cat(
                [pad(each["attention_mask"], (0, length - each["attention_mask"].shape[1])) for each in made]
            ),
        }

    def _one(self, clip: Clip) -> Any:
        how = _PADDING[self.model_type]
        return self.extractor(
            clip, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt", **how
        )

    def _windows(self, clip: Clip) -> torch.Tensor:
        """As ``VoxtralProcessor`` cuts them, for windows of 200 frames."""
        made = self.extractor(
            clip,
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=200 * 160,
            return_tensors="pt",
        )
        features: torch.Tensor = made["input_features"].reshape(self.extractor.feature_size, -1, 200)
        return features.transpose(0, 1)

    def greedy(
        self, prompt: list[int], clips: Sequence[Clip], max_tokens: int, **inputs: torch.Tensor
    ) -> list[int]:
        """The tokens that follow; ``inputs``: those of pictures."""
        input_ids = torch.tensor([prompt])
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            **(self.features(clips) if clips else {}),
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens
