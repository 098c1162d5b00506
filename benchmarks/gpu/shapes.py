"""The models whose steps are timed: sizes for the simulator's arithmetic, and how to make their folders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.sim.models import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel(ModelShape):
    """A decoder's sizes, and the other arguments of ``make_model_folder``."""

    family: str
    tied: bool
    max_model_len: int

    @property
    def folder_options(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "tie": self.tied,
            "max_position_embeddings": self.max_model_len,
        }


LLAMA_8B = TimedModel(
    name="Llama-3.1-8B",
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    tied=False,
    max_model_len=131_072,
)
QWEN_06B = TimedModel(
    name="Qwen3-0.6B",
    family="qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tied=True,
    max_model_len=40_960,
)
TOY_LLAMA = TimedModel(
    name="toy Llama",
    family="llama",
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=512,
    tied=False,
    max_model_len=1024,
)
TOY_QWEN = TimedModel(
    name="toy Qwen3",
    family="qwen3",
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    tied=True,
    max_model_len=1024,
)
