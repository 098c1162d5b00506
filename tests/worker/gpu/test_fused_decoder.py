"""A decoder in fused steps has transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig
from engine.records.kv_cache_groups import one_group
from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.gpu.fused_decoder import FusedDecoder, with_fused_steps
from engine.worker.gpu.ops import FusedOps
from engine.worker.gpu.paged_kv import PagedKv
from engine.worker.gpu.torch_ops import TorchOps
from engine.worker.gpu.triton_ops import TritonOps
from engine.worker.gpu.triton_paged import TritonPagedAttention
from engine.worker.loading.loader import load_model
from engine.worker.loading.tiny_models import make_model_folder

BLOCK_SIZE = 8
BLOCKS_EACH = 6
MAX_POSITIONS = BLOCK_SIZE * BLOCKS_EACH
VARIANTS: dict[str, dict[str, Any]] = {
    "a plain one": {"family": "llama", "num_kv_heads": 1},
    "biases": {"family": "qwen2"},
    "norms of queries and keys, a tied head": {"family": "qwen3", "head_dim": 32, "tie": True},
    "a window": {"family": "mistral", "extra_config": {"sliding_window": 12}},
    "experts": {
        "family": "qwen3_moe",
        "head_dim": 32,
        "extra_config": {"num_experts": 6, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
    },
    "biases of some linears": {
        "family": "seed_oss",
        "extra_config": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    },
    "experts of a sigmoid, shared ones, windows": {
        "family": "dots1",
        "head_dim": 32,
        "extra_config": {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 12,
            "max_window_layers": 1,
        },
    },
    "scaled angles": {
        "family": "llama",
        "extra_config": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
    },
}
STEPS = ({0: 14}, {0: 1, 1: 9}, {0: 1, 1: 1}, {0: 1, 1: 11})
"""New tokens by sequence: prompts alone, beside a decode, decodes, a chunk after cached tokens."""


class WrittenAttention(TorchPagedAttention):
    """A PagedKv in plain torch: it reads K and V of the step from their pages."""

    kv_scale = 1.0

    def begin_step(self, batch: AttentionBatch) -> None:
        super().begin_step(batch)
        self._slots = torch.from_numpy(batch.slot_blocks * BLOCK_SIZE + batch.slot_offsets)

    def slots_of(self, layer: int) -> torch.Tensor:
        return self._slots

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool[:, layer, 0], self._pool[:, layer, 1]

    def attend_written(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert soft_cap is None
        assert sinks is None
        assert chunk is None
        places = self._slots // BLOCK_SIZE, self._slots % BLOCK_SIZE
        key, value = (pages[places] for pages in self.pages(layer))
        return self.attend(layer, query, key, value, scale=scale, window=window)


@dataclass(frozen=True, slots=True)
class Models:
    """One folder's model: fused, and transformers' own."""

    fused: FusedDecoder
    attention: PagedKv
    reference: torch.nn.Module


def batch_of(starts: list[int], counts: list[int], seqs: list[int]) -> AttentionBatch:
    """A batch with ``counts[i]`` tokens of sequence ``seqs[i]`` after ``starts[i]`` cached; blocks differ."""
    tables = 1 + BLOCKS_EACH * np.array(seqs)[:, None] + np.arange(BLOCKS_EACH)
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    owners = np.repeat(np.arange(len(seqs)), counts)
    return AttentionBatch(
        num_decodes=counts.count(1),
        query_lens=np.array(counts, dtype=np.int64),
        seq_lens=np.array(starts, dtype=np.int64) + counts,
        block_tables=tables,
        slot_blocks=tables[owners, positions // BLOCK_SIZE],
        slot_offsets=positions % BLOCK_SIZE,
    )


def build(
    folder: Path, ops: FusedOps, backend: Callable[[torch.Tensor], PagedKv] = WrittenAttention
) -> Models:
    model = load_model(ModelConfig(model=str(folder), device="cpu")).model
    spec = KvCacheSpec(
        one_group(model.num_layers), model.num_kv_heads, model.head_dim, torch.float32, BLOCK_SIZE
    )
    attention = backend(spec.allocate(1 + 2 * BLOCKS_EACH, torch.device("cpu")))
    fused = with_fused_steps(model, attention, ops, MAX_POSITIONS)
    assert isinstance(fused, FusedDecoder)
    return Models(fused, attention, AutoModelForCausalLM.from_pretrained(folder))


def largest_difference(models: Models) -> float:
    """The largest difference of logits after each step's sequences, over all of STEPS."""
    tokens: dict[int, list[int]] = {0: [], 1: []}
    generator = np.random.default_rng(0)
    difference = 0.0
    for step in STEPS:
        seqs = sorted(step, key=lambda seq: (step[seq] != 1, len(tokens[seq])))
        starts, counts = [len(tokens[seq]) for seq in seqs], [step[seq] for seq in seqs]
        news = {seq: generator.integers(0, 500, step[seq]).tolist() for seq in seqs}
        for seq in seqs:
            tokens[seq] += news[seq]
        models.attention.begin_step(batch_of(starts, counts, seqs))
        logits = models.fused.forward(
            torch.tensor([token for seq in seqs for token in news[seq]]),
            torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]),
            torch.tensor(counts).cumsum(0) - 1,
            models.attention,
        )
        for seq, row in zip(seqs, logits, strict=True):
            expected = models.reference(torch.tensor([tokens[seq]])).logits[0, -1]
            difference = max(difference, float((row - expected).abs().max()))
    return difference


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    make_model_folder(tmp_path, **VARIANTS[variant])
    assert largest_difference(build(tmp_path, TorchOps())) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["biases", "norms of queries and keys, a tied head", "experts"])
@torch.inference_mode()
def test_by_kernels_alone_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """The elementwise ops and the attention are Triton's, as on a GPU."""
    make_model_folder(tmp_path, **VARIANTS[variant])
    assert largest_difference(build(tmp_path, TritonOps(), TritonPagedAttention)) < 2e-5


@torch.inference_mode()
def test_steps_over_another_attention_are_the_plain_model_s(tmp_path: Path) -> None:
    make_model_folder(tmp_path)
    models = build(tmp_path, TorchOps())
    spec = KvCacheSpec(
        one_group(models.fused.num_layers),
        models.fused.num_kv_heads,
        models.fused.head_dim,
        torch.float32,
        BLOCK_SIZE,
    )
    other = TorchPagedAttention(spec.allocate(1 + BLOCKS_EACH, torch.device("cpu")))
    ids, positions = torch.arange(5), torch.arange(5)
    logits = []
    for attention in (models.attention, other):
        attention.begin_step(batch_of([0], [5], [0]))
        logits.append(models.fused.forward(ids, positions, torch.tensor([4]), attention))
    torch.testing.assert_close(*logits)


def test_a_model_of_another_kind_stays_as_it_is(tmp_path: Path) -> None:
    make_model_folder(tmp_path, "gpt_neox")
    model = load_model(ModelConfig(model=str(tmp_path), device="cpu")).model
    attention = WrittenAttention(torch.empty(1, 2, 2, BLOCK_SIZE, 4, 16))
    assert with_fused_steps(model, attention, TorchOps(), MAX_POSITIONS) is model
