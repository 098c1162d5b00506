"""Compares layers with states in compiled code with torch: one interleaved run, on one thread.

    python -m benchmarks.cpu.states [--seconds 60]

The layers are those of Qwen3-Next-80B-A3B (gated delta rule: 16 key heads, 32 value heads, states of 128 x
128) and of Granite 4.0 Small (selective scan: 128 heads of 64, states of 128), and their convolutions, in
bf16 with random inputs. Each step uses the next of several layers' states, which no cache holds. Compiled
code computes a prompt token by token, torch in chunks of 64.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from engine.worker.cpu.state_kernels import state_kernels
from engine.worker.states import torch_states
from engine.worker.states.operations import Convolution, DeltaRule, OverTokens, Scan
from engine.worker.states.selection import StateOps
from engine.worker.states.state_batch import StateBatch
from eval.say import say

CASES = {"decode at 1": (1, 1), "decode at 8": (8, 1), "prefill of 512": (1, 512)}
"""Number of sequences, and new tokens of each."""
NUM_LAYERS = 16
"""Layers, each with a separate pool of states."""
WIDTH = 4
"""Inputs of a convolution's window."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layer, with its operation in a case and a pool for each of the layers."""

    function: str
    operation: OverTokens
    pools: list[torch.Tensor]
    batch: StateBatch

    def run(self, ops: StateOps, step: int) -> None:
        getattr(ops, self.function)(self.operation, self.pools[step % NUM_LAYERS], self.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, StateOps] = {"compiled": state_kernels(), "torch": torch_states}
    layers = {
        (case, kind): make(*CASES[case]) for case, (kind, make) in itertools.product(CASES, KINDS.items())
    }
    # On one thread, in its own CPU seconds: other work on the machine takes cores, but is not counted.
    seconds: dict[tuple[str, str, str], list[float]] = {}
    end = time.perf_counter() + arguments.seconds
    for step in itertools.count():
        if time.perf_counter() > end:
            break
        for (case, kind), layer in layers.items():
            for way, ops in ways.items():
                begin = time.thread_time()
                layer.run(ops, step)
                if step:  # the first step touches pages
                    seconds.setdefault((case, kind, way), []).append(time.thread_time() - begin)
    _show(layers, seconds)


def _show(layers: dict[tuple[str, str], Layer], seconds: dict[tuple[str, str, str], list[float]]) -> None:
    for case, kind in layers:
        ours, torchs = (median(seconds[case, kind, way]) for way in ("compiled", "torch"))
        ratio = median(
            theirs / own
            for own, theirs in zip(seconds[case, kind, "compiled"], seconds[case, kind, "torch"], strict=True)
        )
        say(
            f"{case:16} {kind:18} compiled {1000 * ours:8.2f} ms, torch {1000 * torchs:8.2f} ms: "
            f"{ratio:5.1f} times ({len(seconds[case, kind, 'torch'])} pairs)"
        )


def _batch(num_seqs: int, num_tokens: int) -> StateBatch:
    slots = np.arange(1, num_seqs + 1)
    return StateBatch(np.full(num_seqs, num_tokens), slots, slots)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _delta_rule(num_seqs: int, num_tokens: int) -> Layer:
    tokens = num_seqs * num_tokens
    q = _noise(tokens, 16, 128)
    k = _noise(tokens, 16, 128)
    v = _noise(tokens, 32, 128)
    pools = [torch.zeros(num_seqs + 1, 32, 128, 128) for _ in range(NUM_LAYERS)]
    rule = DeltaRule(q, k, v, -torch.rand(tokens, 32), _noise(tokens, 32).sigmoid())
    return Layer("gated_delta_rule", rule, pools, _batch(num_seqs, num_tokens))


def _scan(num_seqs: int, num_tokens: int) -> Layer:
    tokens = num_seqs * num_tokens
    x = _noise(tokens, 128, 64)
    dt = _noise(tokens, 128)
    b = _noise(tokens, 1, 128)
    c = _noise(tokens, 1, 128)
    pools = [torch.zeros(num_seqs + 1, 128, 64, 128) for _ in range(NUM_LAYERS)]
    a = -torch.rand(128)
    d = torch.rand(128)
    dt_bias = torch.rand(128)
    scan = Scan(x, dt, b, c, a, d, dt_bias)
    return Layer("selective_scan", scan, pools, _batch(num_seqs, num_tokens))


def _conv(num_seqs: int, num_tokens: int) -> Layer:
    pools = [torch.zeros(num_seqs + 1, 8192, WIDTH - 1).bfloat16() for _ in range(NUM_LAYERS)]
    conv = Convolution(_noise(num_seqs * num_tokens, 8192), _noise(8192, WIDTH))
    return Layer("causal_conv", conv, pools, _batch(num_seqs, num_tokens))


KINDS: dict[str, Callable[[int, int], Layer]] = {
    "delta rule": _delta_rule,
    "selective scan": _scan,
    "convolution": _conv,
}


if __name__ == "__main__":
    main()
