"""Reads from a model folder how its model reads audio. Knows no model code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.media.limits import MAX_CLIP_S
from engine.records.media import AudioModel, TokenRule
from engine.worker.loading.model_folder import raw_config
from engine.worker.loading.text_decoder import thinker_of
from engine.worker.media.processor_files import processor_fields, whole_number

_RULES = {
    "qwen2_audio": TokenRule.HALVED_TWICE,
    "qwen2_5_omni_thinker": TokenRule.HALVED_TWICE,
    "qwen3_omni_moe_thinker": TokenRule.CHUNKS,
    "voxtral": TokenRule.WINDOWS,
}
"""The number of tokens of a clip, by model type. All have Whisper's features."""
_EXTRACTOR = "WhisperFeatureExtractor"
_FIELDS = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""Fields of the feature extractor, with its defaults."""
_MOST = {"feature_size": 1024, "sampling_rate": 192_000, "chunk_length": MAX_CLIP_S, "n_fft": 2**16}


@dataclass(frozen=True, slots=True)
class AudioFolder:
    """How a folder's model reads audio."""

    model: AudioModel
    extractor: dict[str, int]
    """The fields of its feature extractor, Whisper's."""


def read_audio_folder(folder: Path, options: ModelConfig) -> AudioFolder | None:
    """The folder's description, with the options' limit; None if its model reads no audio, or the options
    disable it. Raises ModelLoadError."""
    raw = thinker_of(raw_config(folder))
    audio = raw.get("audio_config")
    rule = _RULES.get(str(raw.get("model_type")))
    if rule is None or not isinstance(audio, dict) or not options.max_clips:
        return None
    fields = processor_fields(folder, "feature_extractor", "hop_length")
    if fields is None:
        return None
    if (named := fields.get("feature_extractor_type", _EXTRACTOR)) != _EXTRACTOR:
        raise ModelLoadError(f"feature_extractor_type in {folder} must be {_EXTRACTOR}, got {named!r}.")
    extractor = _extractor(fields, audio, folder)
    # Encoders with absolute positions reach as far as their features are padded.
    most_s = extractor["chunk_length"] if rule is TokenRule.HALVED_TWICE else MAX_CLIP_S
    model = AudioModel(
        token_id=_token_id(raw, folder),
        sampling_rate=extractor["sampling_rate"],
        hop_length=extractor["hop_length"],
        rule=rule,
        max_samples=extractor["sampling_rate"] * most_s,
        max_count=options.max_clips,
    )
    if rule is TokenRule.WINDOWS:
        model = _with_windows(model, audio, folder)
    return AudioFolder(model, extractor)


def _extractor(fields: Mapping[str, Any], audio: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """The fields of Whisper's feature extractor that decide on features. Raises ModelLoadError."""
    found = {name: whole_number(fields, name, default, folder) for name, default in _FIELDS.items()}
    for name, most in _MOST.items():
        if found[name] > most:
            raise ModelLoadError(
                f"{name} in the configs of {folder} must be at most {most}, got {found[name]}."
            )
    num_bins = whole_number(audio, "num_mel_bins", found["feature_size"], folder)
    if found["feature_size"] != num_bins:
        raise ModelLoadError(
            f"The features of {folder} have {found['feature_size']} numbers; its encoder reads {num_bins}."
        )
    return found


def _token_id(raw: Mapping[str, Any], folder: Path) -> int:
    """The token of a clip, under either of its names."""
    named = {"audio_token_id": raw.get("audio_token_id", raw.get("audio_token_index"))}
    if named["audio_token_id"] is None:
        raise ModelLoadError(f"{folder}/config.json has no audio_token_id.")
    return whole_number(named, "audio_token_id", 0, folder)


def _with_windows(model: AudioModel, audio: Mapping[str, Any], folder: Path) -> AudioModel:
    """Voxtral's encoder reads windows of all its positions. A token is as many outputs as its projector
    joins."""
    positions = whole_number(audio, "max_source_positions", 1500, folder)
    hidden = whole_number(audio, "hidden_size", 1280, folder)
    joined = whole_number(audio, "intermediate_size", 5120, folder) // hidden
    window = 2 * positions * model.hop_length  # one of its convolutions halves the number of frames
    return msgspec.structs.replace(model, window=window, window_tokens=positions // max(1, joined))
