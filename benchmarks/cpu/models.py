"""The models that are measured: folders of random weights, made when first needed and kept."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.say import say

MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model, and the size of our server's KV pool for it."""

    name: str
    family: str
    shape: dict[str, Any]
    """Arguments of ``make_model_folder`` in addition to the family."""
    kv_bytes: int

    def folder(self, within: Path) -> Path:
        """Returns the model's folder; makes it unless it is complete."""
        folder = within / self.name
        if not folder.exists():
            say(f"making the model {self.name} in {folder}")
            self._make(folder)
        return folder

    def _make(self, folder: Path) -> None:
        # Imported here: reading a command's --help needs no torch.
        from engine.worker.loading.tiny_models import make_model_folder

        half_made = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(half_made, ignore_errors=True)
        make_model_folder(half_made, self.family, dtype="bfloat16", **self.shape)
        half_made.rename(folder)


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of a model's weights as they are stored."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


TINY = BenchModel(
    "tiny",
    "llama",
    {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_layers": 12,
        "num_heads": 8,
        "num_kv_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": MAX_MODEL_LEN,
    },
    kv_bytes=256 * 2**20,
)
"""14 million parameters: a step is nearly all the engine's own work."""
SMALL = BenchModel(
    "small",
    "qwen3",
    {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie": True,
    },
    kv_bytes=2 * 2**30,
)
"""596 million parameters, the dimensions of Qwen3-0.6B: a step is nearly all arithmetic."""
MOE = BenchModel(
    "moe-1.5b",
    "qwen3_moe",
    {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 9,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie": True,
        "extra_config": {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
        },
    },
    kv_bytes=2**30,
)
"""1.6 billion parameters, 0.3 billion active: Qwen3-30B-A3B at half its width and with nine layers."""
GPT_OSS = BenchModel(
    "gpt-oss-1b",
    "gpt_oss",
    {
        "hidden_size": 768,
        "intermediate_size": 768,
        "num_layers": 12,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 64,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "extra_config": {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    },
    kv_bytes=2**30,
)
"""A billion parameters in gpt-oss-20b's proportions: sinks, a window in every other layer, 32 experts."""
GEMMA = BenchModel(
    "gemma-270m",
    "gemma3_text",
    {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_layers": 18,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "vocab_size": 262_144,
        "max_position_embeddings": 32_768,
        "tie": True,
        "extra_config": {"sliding_window": 512, "query_pre_attn_scalar": 256},
    },
    kv_bytes=2**30,
)
"""The dimensions of Gemma-3-270m: 170 of 268 million parameters are the embedding."""
MODELS = {model.name: model for model in (TINY, SMALL, MOE, GPT_OSS, GEMMA)}
USUAL = (TINY, SMALL)
"""The models that are measured unless some are named."""
