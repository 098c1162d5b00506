"""transformers' own models and processors of audio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoFeatureExtractor, Gemma4AudioFeatureExtractor

from tests.audio.audio_folders import RATE, Clip, class_of
from tests.worker.generation import continued

_PADDING: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"padding": "max_length"},
    "qwen2_5_omni_thinker": {"padding": "max_length"},
    "qwen3_omni_moe_thinker": {"padding": True, "truncation": False},
}
"""What the processor of each model type passes to its feature extractor."""


def _padded(made: Sequence[Any], name: str, dim: int) -> dict[str, torch.Tensor]:
    """The features of all clips in one tensor, as long as the longest."""
    length = max(each[name].shape[dim] for each in made)
    around = [0, 0] * (made[0][name].dim() - 1 - dim)
    pad = torch.nn.functional.pad
    parts = [pad(each[name], (*around, 0, length - each[name].shape[dim])) for each in made]
    return {name: torch.cat(parts)}


class AudioReference:
    """transformers' model of a folder, and its features of clips."""

    def __init__(self, folder: Path) -> None:
        self.model_type = json.loads((folder / "config.json").read_text())["model_type"]
        self.model = class_of(self.model_type).from_pretrained(folder)
        extractors: Any = AutoFeatureExtractor
        if self.model_type == "gemma4":
            fields = json.loads((folder / "processor_config.json").read_text())["feature_extractor"]
            self.extractor: Any = Gemma4AudioFeatureExtractor(**fields)
        else:
            self.extractor = extractors.from_pretrained(folder)

    def features(self, clips: Sequence[Clip]) -> dict[str, torch.Tensor]:
        """The model's inputs for the clips, each made alone."""
        if self.model_type == "voxtral":
            return {"input_features": torch.cat([self._windows(clip) for clip in clips])}
        if self.model_type == "gemma4":
            each = [self.extractor([clip], return_tensors="pt") for clip in clips]
            return _padded(each, "input_features", 1) | _padded(each, "input_features_mask", 1)
        made = [self._one(clip) for clip in clips]
        mask = _padded(made, "attention_mask", 1)["attention_mask"]
        return {**_padded(made, "input_features", 2), "feature_attention_mask": mask}

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
        heard = self.features(clips) if clips else {}
        return continued(self.model, prompt, max_tokens, **heard, **inputs)
