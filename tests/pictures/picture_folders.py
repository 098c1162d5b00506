"""Small folders of models that read pictures, written by transformers' own classes, and pictures for them."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer

from engine.records.media import PictureModel, PictureSize
from engine.records.messages import MediaSpan
from tests.media.templates import PLAIN
from tests.worker.loading.multimodal_folders import class_of, random_weights

Picture = npt.NDArray[np.uint8]

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ROW_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCAB_SIZE = 544
PATCH, MERGE = 4, 2
FACTOR = PATCH * MERGE
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_MISTRAL = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": _rope(2, 3, 3)},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": PATCH,
        },
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": _rope(2, 3, 3)},
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 32, "rope_parameters": _rope(6, 5, 5)},
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 16,
            "rope_parameters": _rope(2, 2, 2, partial_rotary_factor=0.5),
        },
        "vision_config": {**_VISION, "num_position_embeddings": 64},
    },
    "mistral3": {
        "text_config": _MISTRAL,
        "vision_config": {**_PIXTRAL, "patch_size": PATCH},
        "spatial_merge_size": MERGE,
    },
    "llava": {
        "text_config": _MISTRAL,
        "vision_config": {**_PIXTRAL, "patch_size": FACTOR},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
"""Fields of small configs, by model type."""


def make_picture_folder(
    to: Path,
    model_type: str,
    tokenizer_of: Path,
    *,
    dtype: str = "float32",
    max_pixels: int = 64 * FACTOR**2,
    seed: int = 0,
) -> Path:
    """Makes a folder with random weights. ``tokenizer_of``: a folder whose tokenizer has <= 512 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    has_rows = model_type in ("mistral3", "llava")
    tokens = ROW_TOKENS if has_rows else TOKENS
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.chat_template = PLAIN
    if has_rows:
        tokenizer.chat_template = PLAIN.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
    id_of = tokenizer.convert_tokens_to_ids
    ids = (
        {"image_token_id": id_of("[IMG]")}
        if has_rows
        else {
            "image_token_id": id_of("<|image_pad|>"),
            "video_token_id": id_of("<|video_pad|>"),
            "vision_start_token_id": id_of("<|vision_start|>"),
            "vision_end_token_id": id_of("<|vision_end|>"),
        }
    )
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type], **ids)
    model = random_weights(class_of(config)(config), seed).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    own = (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 8 * FACTOR}}
        if has_rows
        else {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": FACTOR**2, "longest_edge": max_pixels},
            "merge_size": MERGE,
            "temporal_patch_size": 2,
        }
    )
    processor = {
        **own,
        "patch_size": FACTOR if model_type == "llava" else PATCH,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
        "do_convert_rgb": True,
    }
    (to / "preprocessor_config.json").write_text(json.dumps(processor))
    return to


def copied(folder: Path, to: Path, file: str, **fields: Any) -> Path:
    """Copies a folder and replaces fields in one of its files."""
    shutil.copytree(folder, to)
    content = json.loads((to / file).read_text()) | fields
    (to / file).write_text(json.dumps(content))
    return to


def picture(rows: int, columns: int, seed: int) -> Picture:
    """A picture of noise with a gradient, ``rows`` by ``columns`` tokens large."""
    height, width = rows * FACTOR, columns * FACTOR
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3))
    gradient = np.linspace(0, 127, width).astype(int)[None, :, None]
    return np.asarray(noise + gradient, dtype=np.uint8)


def stored(picture: Picture, offset: int, folder: Path, model: PictureModel) -> MediaSpan:
    """A picture of a prompt, with its pixels in a file."""
    content_hash = sha256(picture.tobytes()).hexdigest()
    path = folder / content_hash
    path.write_bytes(picture.tobytes())
    size = PictureSize(*picture.shape[:2])
    return MediaSpan(content_hash, offset, model.num_tokens(size), size, str(path))
