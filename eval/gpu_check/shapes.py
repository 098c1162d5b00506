"""The models whose steps are timed, by the numbers that say what a step must read and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes, and how ``make_model_folder`` is told of them."""

    name: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    max_model_len: int

    @property
    def body_weights(self) -> int:
        """Of all layers' matrices; norms are left out."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query_size + 2 * kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

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


LLAMA_8B = ModelShape(
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
QWEN_06B = ModelShape(
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
TOY_LLAMA = ModelShape(
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
TOY_QWEN = ModelShape(
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
