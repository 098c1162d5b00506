"""The encoder of audio: transformers' own, with the folder's weights, and its features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.media.audio_folder import AudioFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clip = npt.NDArray[np.float32]
"""[num_samples], at the model's sampling rate."""
_MOST_WINDOWS = 8
"""Windows of one clip that are encoded at a time, so that a long clip needs no more memory."""


class AudioTower(ABC):
    """Encodes clips, one by one: what a clip becomes does not depend on others."""

    def __init__(self, module: PreTrainedModel, folder: AudioFolder, device: torch.device) -> None:
        self.model = folder.model
        self._module: Any = module.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._device = device
        self._extractor = self._extractor_class()(**folder.extractor)

    @staticmethod
    def _extractor_class() -> Any:
        """The class of its feature extractor."""
        from transformers import WhisperFeatureExtractor

        return WhisperFeatureExtractor

    @torch.inference_mode()
    def encode(self, clip: Clip) -> torch.Tensor:
        """The decoder's inputs in place of the clip's tokens: [num_tokens, hidden_size]"""
        return self._encode(clip)

    @abstractmethod
    def _encode(self, clip: Clip) -> torch.Tensor: ...

    def _features(self, clip: Clip, **how: Any) -> tuple[torch.Tensor, int]:
        """The clip's features, [1, feature_size, num_frames], and how many of the frames are not padding."""
        made = self._extractor(
            clip,
            sampling_rate=self.model.sampling_rate,
            return_attention_mask=True,
            return_tensors="pt",
            device=str(self._device),
            **how,
        )
        features = made["input_features"].to(self._device, self._module.dtype)
        return features, int(made["attention_mask"].sum())


class PaddedTower(AudioTower):
    """Qwen2-Audio's: a clip is padded to the whole length that the encoder has positions for."""

    def _encode(self, clip: Clip) -> torch.Tensor:
        from transformers.masking_utils import create_bidirectional_mask

        features, num_frames = self._features(clip, padding="max_length")
        encoder = self._module.audio_tower
        num_heard, num_tokens = encoder._get_feat_extract_output_lengths(torch.tensor(num_frames))
        length = (features.shape[2] - 2) // 2 + 1
        heard = (torch.arange(length, device=self._device) < num_heard).long()[None]
        empty = torch.zeros(1, length, 1, dtype=features.dtype, device=self._device)
        mask = create_bidirectional_mask(config=encoder.config, inputs_embeds=empty, attention_mask=heard)
        hidden = encoder(features, attention_mask=mask).last_hidden_state
        projected: torch.Tensor = self._module.multi_modal_projector(hidden)
        return projected[0, : int(num_tokens)]


class WindowTower(AudioTower):
    """Voxtral's: a clip is cut into windows, the last of which is padded."""

    def _encode(self, clip: Clip) -> torch.Tensor:
        window = self.model.window
        features, _ = self._features(clip, padding=True, truncation=False, pad_to_multiple_of=window)
        frames = window // self.model.hop_length
        windows = features.view(features.shape[1], -1, frames).transpose(0, 1)
        parts = torch.split(windows, _MOST_WINDOWS)
        encoded = [self._module.get_audio_features(part, return_dict=True).pooler_output for part in parts]
        return torch.cat(encoded)


class OmniTower(AudioTower):
    """The audio encoder of a Qwen-Omni thinker, alone, which takes a clip's frames without padding."""

    padding: str | bool = True

    def _encode(self, clip: Clip) -> torch.Tensor:
        features, num_frames = self._features(clip, padding=self.padding, truncation=False)
        length = torch.tensor([num_frames], device=self._device)
        frames = features[0, :, :num_frames]
        output: torch.Tensor = self._module(
            frames, feature_lens=length, **self._more(length)
        ).last_hidden_state
        return output

    def _more(self, length: torch.Tensor) -> dict[str, Any]:
        """Further arguments of the encoder."""
        return {}


class PaddedOmniTower(OmniTower):
    """Qwen2.5-Omni's, whose features are made of the clip with silence up to the maximum length."""

    padding = "max_length"

    def _more(self, length: torch.Tensor) -> dict[str, Any]:
        return {"aftercnn_lens": self._module._get_feat_extract_output_lengths(length)[0]}


class MaskedTower(AudioTower):
    """Gemma 4's, whose features are masked where frames are not whole."""

    @staticmethod
    def _extractor_class() -> Any:
        from transformers import Gemma4AudioFeatureExtractor

        return Gemma4AudioFeatureExtractor

    def _encode(self, clip: Clip) -> torch.Tensor:
        made = self._extractor([clip], return_tensors="pt")
        features = made["input_features"].to(self._device, self._module.dtype)
        mask = made["input_features_mask"].to(self._device)
        output = self._module.get_audio_features(features, mask, return_dict=True)
        encoded: torch.Tensor = output.pooler_output[output.attention_mask]
        return encoded
