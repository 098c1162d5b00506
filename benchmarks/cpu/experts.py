"""Compares a mixture of experts in compiled code with torch's loop over experts: one interleaved run, on one
thread.

    python -m benchmarks.cpu.experts [--seconds 60]

The model has the shape of Qwen3-30B-A3B cut to 1.6 billion parameters, 0.3 billion of them active, in bf16
with random weights: half its width and nine of its layers, with all 128 experts, 8 for each token. All layers
share the first one's experts, which no cache holds, so that making the model takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from eval.say import say

NUM_LAYERS = 9
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": list(range(1, NUM_LAYERS)),
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}
CASES = {"decode at 1": (1, 1), "decode at 8": (8, 1), "prefill of 256": (1, 256)}
"""Number of sequences, and new tokens of each."""
CONTEXT = 512
"""Context tokens before the new tokens of a decode."""
BLOCK_SIZE = 16
NUM_BLOCKS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure")
    arguments = parser.parse_args()
    ways = _ways()
    # On one thread, in its own CPU seconds: other work on the machine takes cores, but is not counted.
    seconds: dict[tuple[str, str], list[float]] = {}
    for case in CASES:  # once untimed: touches pages, grows buffers
        for step in ways.values():
            step(case)
    end = time.perf_counter() + arguments.seconds
    turns = itertools.cycle(itertools.product(CASES, ways.items()))
    while time.perf_counter() < end:
        case, (name, step) = next(turns)
        begin = time.thread_time()
        step(case)
        seconds.setdefault((case, name), []).append(time.thread_time() - begin)
    for case, (num_seqs, num_tokens) in CASES.items():
        for name in ways:
            found = seconds[case, name]
            speed = num_seqs * num_tokens / median(found)
            say(
                f"{case:16} {name:22} {1000 * median(found):9.1f} ms ({1000 * min(found):.1f} to "
                f"{1000 * max(found):.1f}, {len(found)} steps) {speed:9.1f} tokens/s"
            )


def _ways() -> dict[str, Callable[[str], None]]:
    """Returns each implementation as a function that computes a step of a case."""
    import torch

    from engine.records.kv_cache_groups import one_group
    from engine.worker.attention.kv_cache import KvCacheSpec
    from engine.worker.cpu.attention_kernel import CpuKernel
    from engine.worker.cpu.compiled_decoder import CompiledDecoder, with_compiled_steps
    from engine.worker.cpu.paged_attention import CpuPagedAttention
    from engine.worker.models import decoder

    torch.set_num_threads(1)
    packed = _model()
    with patch.object(decoder, "packed_experts", lambda plain, gemm: plain):
        plain = _model()
    spec = KvCacheSpec(
        one_group(packed.num_layers), packed.num_kv_heads, packed.head_dim, torch.bfloat16, BLOCK_SIZE
    )
    attention = CpuPagedAttention(
        spec.allocate(NUM_BLOCKS, torch.device("cpu")), CpuKernel.load(packed.head_dim, torch.bfloat16)
    )
    compiled = with_compiled_steps(packed, attention)
    assert isinstance(compiled, CompiledDecoder)
    models = {"whole steps": compiled, "experts in one call": packed, "torch's loop": plain}

    def runner(model: Any) -> Callable[[str], None]:
        def run(case: str) -> None:
            batch, positions = _batch(*CASES[case])
            attention.begin_step(batch)
            tokens = torch.randint(0, CONFIG["vocab_size"], (len(positions),))
            last = torch.from_numpy(batch.query_lens.cumsum() - 1)
            with torch.inference_mode():
                model.forward(tokens, torch.from_numpy(positions), last, attention)

        return run

    return {name: runner(model) for name, model in models.items()}


def _model() -> Any:
    """Returns the decoder; its weights repeat the same noise, as drawing all of them takes minutes."""
    import torch

    from engine.worker.loading.model_folder import read_config
    from engine.worker.models.decoder import Decoder

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        model = Decoder(read_config(Path(folder), trust_remote_code=False), torch.bfloat16)
    noise = (torch.randn(1 << 20) / 32).bfloat16()

    def fill(parts: dict[str, Any]) -> None:
        for part in parts.values():
            if part.view.dim() == 1:
                part.view.fill_(1.0)
                continue
            for rows in part.view.split(len(noise) // part.view.shape[1]):
                rows.copy_(noise[: rows.numel()].view_as(rows))

    model.materialize(torch.device("cpu"))
    with torch.inference_mode():
        model.load(fill)
    for layer in model.layers:
        layer.mlp = model.layers[0].mlp
    model.shape = replace(model.shape, mlps=model.shape.mlps[:1] * NUM_LAYERS)
    return model


def _batch(num_seqs: int, num_tokens: int) -> tuple[Any, Any]:
    """Returns the attention batch of a step and the positions of its tokens."""
    import numpy as np

    from engine.worker.attention.backend import AttentionBatch

    before = CONTEXT if num_tokens == 1 else 0
    num_blocks = -(-(before + num_tokens) // BLOCK_SIZE)
    tables = 1 + np.arange(num_seqs * num_blocks, dtype=np.int64).reshape(num_seqs, num_blocks)
    positions = np.concatenate([np.arange(before, before + num_tokens, dtype=np.int64)] * num_seqs)
    owner = np.repeat(np.arange(num_seqs), num_tokens)
    batch = AttentionBatch(
        num_decodes=num_seqs if num_tokens == 1 else 0,
        query_lens=np.full(num_seqs, num_tokens, dtype=np.int64),
        seq_lens=np.full(num_seqs, before + num_tokens, dtype=np.int64),
        block_tables=tables,
        slot_blocks=tables[owner, positions // BLOCK_SIZE],
        slot_offsets=positions % BLOCK_SIZE,
    )
    return batch, positions


if __name__ == "__main__":
    main()
