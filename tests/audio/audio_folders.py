"""Small folders of models that read audio, written by transformers' own classes, and sounds for them."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from engine.records.media import AudioModel, ClipSize
from engine.records.messages import MediaSpan
from tests.pictures.picture_folders import TEXT, VOCAB_SIZE
from tests.worker.loading.multimodal_folders import random_weights

Clip = npt.NDArray[np.float32]

RATE = 16_000
NUM_BINS = 16
TOKENS = (
    *("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"),
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template in the form of Qwen2.5-Omni's."""
_WHISPER = {
    "num_mel_bins": NUM_BINS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "max_source_positions": 100,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": _WHISPER},
    "voxtral": {
        "text_config": {**TEXT, "model_type": "llama", "head_dim": 16},
        "audio_config": {
            "num_mel_bins": NUM_BINS,
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_source_positions": 100,
        },
    },
    "gemma4": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "pad_token_id": 3,
            "tie_word_embeddings": False,
        },
        "tie_word_embeddings": False,
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [NUM_BINS, 4],
            "output_proj_dims": 48,
        },
        "vision_config": None,
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**TEXT, "rope_parameters": _rope(2, 3, 3)},
        "audio_config": {**_WHISPER, "n_window": 10, "output_dim": 64},
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {
            **TEXT,
            "head_dim": 32,
            "rope_parameters": _rope(6, 5, 5),
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "audio_config": {
            **_WHISPER,
            "n_window": 50,
            "n_window_infer": 100,
            "conv_chunksize": 4,
            "downsample_hidden_size": 8,
            "output_dim": 64,
        },
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    },
}
"""Fields of small configs, by model type; the longest clip that Whisper's positions reach is 2 s."""
_CLASSES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def class_of(model_type: str) -> Any:
    """The class of transformers for a model type."""
    package = model_type.removesuffix("_thinker")
    return getattr(import_module(f"transformers.models.{package}.modeling_{package}"), _CLASSES[model_type])


def make_audio_folder(to: Path, model_type: str, tokenizer_of: Path, *, seed: int = 0) -> Path:
    """Makes a folder with random weights. ``tokenizer_of``: a folder whose tokenizer has <= 512 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in TOKENS])
    tokenizer.chat_template = TEMPLATE
    if model_type == "gemma4":  # as published: the processor adds what is around a clip
        tokenizer.chat_template = TEMPLATE.replace("<|audio_bos|><|AUDIO|><|audio_eos|>", "<|AUDIO|>")
    id_of = tokenizer.convert_tokens_to_ids
    ids = {"audio_token_id": id_of("<|AUDIO|>"), "audio_token_index": id_of("<|AUDIO|>")}
    if CONFIGS[model_type].get("vision_config"):
        ids |= {name: id_of("<|IMAGE|>") for name in ("image_token_id", "image_token_index")}
        ids |= {name: id_of("<|VIDEO|>") for name in ("video_token_id", "video_token_index")}
        ids |= {"audio_start_token_id": id_of("<|audio_bos|>"), "audio_end_token_id": id_of("<|audio_eos|>")}
        ids |= {
            "vision_start_token_id": id_of("<|vision_bos|>"),
            "vision_end_token_id": id_of("<|vision_eos|>"),
        }
    if model_type == "gemma4":
        ids |= {"boa_token_id": id_of("<|audio_bos|>"), "eoa_token_index": id_of("<|audio_eos|>")}
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type], **ids)
    model: PreTrainedModel = random_weights(class_of(model_type)(config), seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    processor: dict[str, Any] = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": NUM_BINS,
        "sampling_rate": RATE,
        "hop_length": 160,
        "chunk_length": 2,
        "n_fft": 400,
    }
    if model_type == "gemma4":
        fields = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "sampling_rate": RATE}
        processor = {"feature_extractor": {**fields, "feature_size": NUM_BINS, "preemphasis": 0.97}}
        (to / "processor_config.json").write_text(json.dumps(processor))
        return to
    if CONFIGS[model_type].get("vision_config"):
        processor |= {
            "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28],
        }
    (to / "preprocessor_config.json").write_text(json.dumps(processor))
    return to


def sound(seconds: float, seed: int) -> Clip:
    """A tone that glides, with noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, len(time))
    tone = 0.4 * np.sin(2 * np.pi * (200 + 90 * seed + 300 * time) * time)
    return np.asarray(tone + noise, dtype=np.float32)


def stored(clip: Clip, offset: int, folder: Path, model: AudioModel) -> MediaSpan:
    """A clip of a prompt, with its samples in a file."""
    content_hash = sha256(clip.tobytes()).hexdigest()
    path = folder / content_hash
    path.write_bytes(clip.tobytes())
    size = ClipSize(len(clip))
    return MediaSpan(content_hash, offset, model.num_tokens(size), size, str(path))
