"""Reads from a model folder how its model reads pictures. Knows no model code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.records.media import PictureModel
from engine.worker.loading.model_folder import raw_config
from engine.worker.loading.text_decoder import thinker_of
from engine.worker.media.processor_files import processor_fields, whole_number

QWEN_TYPES = frozenset(
    (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"),
        *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    )
)
"""Model types that limit the number of pixels, and whose tokens have three positions."""
_PIXTRAL_TYPES = frozenset(("mistral3", "llava"))
"""Model types that may have Pixtral's tower, which limits the longest side of a picture."""
_ROW_ENDS = ("[IMG_BREAK]", "[IMG_END]")
"""Tokens after a row of a picture and after the last row, for Pixtral's tower."""


@dataclass(frozen=True, slots=True)
class PictureFolder:
    """How a folder's model reads pictures."""

    model: PictureModel
    temporal_patch_size: int
    """Number of frames per patch; a picture is repeated for all of them."""
    scale: float
    """Factor of a pixel's bytes, before mean and deviation."""
    mean: tuple[float, ...]
    """Mean of each color, subtracted from pixels."""
    deviation: tuple[float, ...]
    """Standard deviation of each color, by which pixels are divided."""


def read_picture_folder(folder: Path, options: ModelConfig) -> PictureFolder | None:
    """The folder's description, with the options' limits; None if its model reads no pictures, or the options
    disable them. Raises ModelLoadError or ConfigError."""
    raw = thinker_of(raw_config(folder))
    model_type = raw.get("model_type")
    vision = raw.get("vision_config")
    if not isinstance(vision, dict) or not options.max_pictures:
        return None
    is_pixtral = vision.get("model_type") == "pixtral" and model_type in _PIXTRAL_TYPES
    if not is_pixtral and model_type not in QWEN_TYPES:
        return None
    processor = processor_fields(folder, "image_processor", "image_mean")
    if processor is None:
        return None
    read = _pixtral_folder if is_pixtral else _qwen_folder
    return read(folder, options, raw, vision, processor)


def _qwen_folder(
    folder: Path,
    options: ModelConfig,
    raw: Mapping[str, Any],
    vision: Mapping[str, Any],
    processor: Mapping[str, Any],
) -> PictureFolder:
    patch = whole_number(vision, "patch_size", 16 if "3" in raw["model_type"] else 14, folder)
    merge = whole_number(vision, "spatial_merge_size", 2, folder)
    factor = patch * merge
    least, most = _pixel_limits(processor, factor, folder)
    least = options.min_pixels or least
    most = options.max_pixels or most
    if not factor**2 <= least <= most:
        raise ConfigError(
            f"min_pixels and max_pixels must be {factor**2} <= min_pixels <= max_pixels for this model, got "
            f"{least} and {most}."
        )
    return PictureFolder(
        PictureModel(
            token_id=_token_id(raw, 151655, folder),
            patch_size=patch,
            merge_size=merge,
            min_pixels=least,
            max_pixels=most,
            max_count=options.max_pictures,
        ),
        whole_number(vision, "temporal_patch_size", 2, folder),
        *_colors_of(processor, folder),
    )


def _pixtral_folder(
    folder: Path,
    options: ModelConfig,
    raw: Mapping[str, Any],
    vision: Mapping[str, Any],
    processor: Mapping[str, Any],
) -> PictureFolder | None:
    """None without a tokenizer that has the tokens for ends of rows."""
    if options.min_pixels is not None or options.max_pixels is not None:
        raise ConfigError("min_pixels and max_pixels are not for this model, which limits the longest side.")
    ends = [_added_token(folder, name) for name in _ROW_ENDS]
    if None in ends:
        return None
    patch = whole_number(vision, "patch_size", 16, folder)
    merge = whole_number(raw, "spatial_merge_size", 2 if raw["model_type"] == "mistral3" else 1, folder)
    edge = whole_number(processor.get("size") or {}, "longest_edge", 1024, folder)
    model = PictureModel(
        token_id=_token_id(raw, 10, folder),
        patch_size=patch,
        merge_size=merge,
        min_pixels=0,
        max_pixels=edge**2,
        max_count=options.max_pictures,
        max_edge=edge,
        row_end_id=ends[0],
        end_id=ends[1],
    )
    return PictureFolder(model, 1, *_colors_of(processor, folder))


def _token_id(raw: Mapping[str, Any], default: int, folder: Path) -> int:
    """The token of a picture, under either of its names."""
    own = {"image_token_id": raw.get("image_token_id", raw.get("image_token_index"))}
    return whole_number(own, "image_token_id", default, folder)


def _added_token(folder: Path, text: str) -> int | None:
    """The id of an added token of the folder's tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        added: Any = json.loads(path.read_text("utf-8")).get("added_tokens", [])
        return next((int(token["id"]) for token in added if token["content"] == text), None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path} is no tokenizer: {error!r}.") from error


def _colors_of(
    processor: Mapping[str, Any], folder: Path
) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """The factor, mean and deviation of colors."""
    scale: Any = processor.get("rescale_factor", 1 / 255)
    if type(scale) not in (int, float):
        raise ModelLoadError(f"rescale_factor in the configs of {folder} must be a number, got {scale!r}.")
    means = _colors(processor, "image_mean", folder), _colors(processor, "image_std", folder)
    return float(scale), *means


def _pixel_limits(processor: Mapping[str, Any], factor: int, folder: Path) -> tuple[int, int]:
    """The smallest and the largest number of pixels, under any of the names that processors have used."""
    size: Any = processor.get("size")
    size = size if isinstance(size, dict) else {}
    least = {"min_pixels": processor.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge")}
    most = {"max_pixels": processor.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge")}
    smallest = whole_number(least, "min_pixels", 4 * factor**2, folder)
    return max(smallest, factor**2), whole_number(most, "max_pixels", 1280 * factor**2, folder)


def _colors(processor: Mapping[str, Any], name: str, folder: Path) -> tuple[float, ...]:
    values = processor.get(name)
    if (
        not isinstance(values, list)
        or len(values) != 3
        or not all(type(value) in (int, float) for value in values)
    ):
        raise ModelLoadError(f"{name} in the configs of {folder} must be three numbers, got {values!r}.")
    return tuple(float(value) for value in values)
