"""Reads from a model folder how its model reads audio. Knows no model code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.media.limits import MAX_CLIP_S, MAX_SAMPLING_RATE
from engine.records.media import AudioModel, TokenRule
from engine.worker.loading.model_folder import raw_config
from engine.worker.loading.text_decoder import thinker_of
from engine.worker.media.processor_files import processor_fields, whole_number

_RULES = {
    "qwen2_audio": TokenRule.HALVED_TWICE,
    "qwen2_5_omni_thinker": TokenRule.HALVED_TWICE,
    "qwen3_omni_moe_thinker": TokenRule.CHUNKS,
    "voxtral": TokenRule.WINDOWS,
    "gemma4": TokenRule.WHOLE_FRAMES,
}
"""The number of tokens of a clip, by model type. All but Gemma's have Whisper's features."""
_WHISPER = "WhisperFeatureExtractor"
_GEMMA = "Gemma4AudioFeatureExtractor"
_FIELDS = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""Fields of Whisper's feature extractor, with its defaults."""
_GEMMA_SIZES = {"feature_size": 128, "sampling_rate": 16_000}
_GEMMA_FIELDS = {
    "frame_length_ms": 20.0,
    "hop_length_ms": 10.0,
    "min_frequency": 0.0,
    "max_frequency": 8000.0,
    "preemphasis": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 1e-3,
}
"""Fields of Gemma 4's feature extractor, with its defaults."""
_GEMMA_SWITCHES = ("preemphasis_htk_flavor", "fft_overdrive")
_GEMMA_LISTS = ("per_bin_mean", "per_bin_stddev")
_LARGEST = 100_000
_GEMMA_BEGIN = 256_000
_GEMMA_END = 258_883
"""Gemma 4's tokens around a clip, if its config does not name them."""
_GEMMA_SECONDS = 30
"""The longest clip that Gemma 4's processor does not cut."""
_MOST = {"feature_size": 1024, "sampling_rate": MAX_SAMPLING_RATE, "chunk_length": MAX_CLIP_S, "n_fft": 2**16}


@dataclass(frozen=True, slots=True)
class AudioFolder:
    """How a folder's model reads audio."""

    model: AudioModel
    extractor: dict[str, Any]
    """The fields of its feature extractor."""


def read_audio_folder(folder: Path, options: ModelConfig) -> AudioFolder | None:
    """The folder's description, with the options' limit; None if its model reads no audio, or the options
    disable it. Raises ModelLoadError."""
    raw = thinker_of(raw_config(folder))
    audio = raw.get("audio_config")
    rule = _RULES.get(str(raw.get("model_type")))
    if rule is None or not isinstance(audio, dict) or not options.max_clips:
        return None
    fields = processor_fields(folder, "feature_extractor", "sampling_rate")
    if fields is None:
        return None
    needed = _GEMMA if rule is TokenRule.WHOLE_FRAMES else _WHISPER
    if (named := fields.get("feature_extractor_type", needed)) != needed:
        raise ModelLoadError(f"feature_extractor_type in {folder} must be {needed}, got {named!r}.")
    if rule is TokenRule.WHOLE_FRAMES:
        return _gemma_folder(raw, fields, folder, options)
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


def _gemma_folder(
    raw: Mapping[str, Any], fields: Mapping[str, Any], folder: Path, options: ModelConfig
) -> AudioFolder:
    """The description for Gemma 4, whose frames are given in milliseconds."""
    extractor = _gemma_extractor(fields, raw["audio_config"], folder)
    end = {"eoa_token_id": raw.get("eoa_token_id", raw.get("eoa_token_index"))}
    rate = extractor["sampling_rate"]
    hop, frame = (round(rate * extractor[f"{name}_length_ms"] / 1000) for name in ("hop", "frame"))
    model = AudioModel(
        token_id=_token_id(raw, folder),
        sampling_rate=rate,
        hop_length=max(1, hop),
        rule=TokenRule.WHOLE_FRAMES,
        max_samples=rate * _GEMMA_SECONDS,
        max_count=options.max_clips,
        frame_length=frame,
        begin_id=whole_number(raw, "boa_token_id", _GEMMA_BEGIN, folder),
        end_id=whole_number(end, "eoa_token_id", _GEMMA_END, folder),
    )
    return AudioFolder(model, extractor)


def _gemma_extractor(fields: Mapping[str, Any], audio: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of Gemma 4's feature extractor that decide on features. Raises ModelLoadError."""
    found: dict[str, Any] = {
        name: whole_number(fields, name, default, folder) for name, default in _GEMMA_SIZES.items()
    }
    _check_most(found, folder)
    num_bins = found["feature_size"]
    _check_bins(num_bins, (audio.get("subsampling_conv_channels") or [128])[0], folder)
    for name, default in _GEMMA_FIELDS.items():
        found[name] = value = fields.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            raise ModelLoadError(
                f"{name} in the configs of {folder} must be from 0 to {_LARGEST}, got {value!r}."
            )
    for name in _GEMMA_LISTS:
        found[name] = values = fields.get(name)
        if values is not None and (not isinstance(values, list) or len(values) != num_bins):
            raise ModelLoadError(f"{name} in the configs of {folder} must be {num_bins} numbers.")
    return found | {name: bool(fields[name]) for name in _GEMMA_SWITCHES if name in fields}


def _extractor(fields: Mapping[str, Any], audio: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """The fields of Whisper's feature extractor that decide on features. Raises ModelLoadError."""
    found = {name: whole_number(fields, name, default, folder) for name, default in _FIELDS.items()}
    _check_most(found, folder)
    _check_bins(found["feature_size"], audio.get("num_mel_bins", found["feature_size"]), folder)
    if found["n_fft"] >= found["sampling_rate"] // 5:
        raise ModelLoadError(f"n_fft in the configs of {folder} must be less than a fifth of a second.")
    return found


def _check_most(sizes: Mapping[str, int], folder: Path) -> None:
    for name, most in _MOST.items():
        if sizes.get(name, 0) > most:
            raise ModelLoadError(
                f"{name} in the configs of {folder} must be at most {most}, got {sizes[name]}."
            )


def _check_bins(of_features: int, of_encoder: object, folder: Path) -> None:
    if of_features != of_encoder:
        raise ModelLoadError(
            f"The features of {folder} have {of_features} numbers; its encoder reads {of_encoder}."
        )


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
