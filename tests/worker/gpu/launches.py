"""Finds the kernels that are compiled while requests are served: no kernel runs, but each launch is bound as
on a GPU, where types and divisibility of arguments decide the build.

Runs in a separate process, because the tests' process uses the interpreter.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from engine.frontend.llm import LLM, engine_config
from engine.records.sampling_params import SamplingParams
from engine.worker.gpu.backend import GPUBackend
from engine.worker.gpu.triton_sampling import TritonSamplingOps
from engine.worker.loading.loader import load_model
from engine.worker.parallel.group import ALONE
from tests.worker.gpu.device_engine import spec_of

KERNELS = ("triton_attention", "triton_experts", "triton_gather", "triton_ops", "triton_sampling")
MAX_GRID = 65535
"""Limit of all dimensions but the first (CUDA C++ Programming Guide, table of compute capabilities)."""
LENGTHS = ((40, 1, 600), (1, 5, 5), (2, 16, 16), (3, 1500, 1900))
"""Numbers of concurrent requests, with the fewest and the most tokens of each."""
PARAMS = ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1, "presence_penalty": 0.5})


@cache
def _binder(kernel: Any) -> Callable[..., tuple[dict[str, Any], list[Any], dict[str, Any]]]:
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind: Callable[..., tuple[dict[str, Any], list[Any], dict[str, Any]]] = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    return bind


def record_launches() -> set[str]:
    """A growing set of the builds that kernels are launched with from now on."""
    kinds: set[str] = set()
    draw = TritonSamplingOps.draw

    def launch(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        _, types, options = _binder(kernel)(*args, **named)
        assert all(type(size) is int for size in grid), "the launcher takes no others"
        assert max(grid[1:], default=1) <= MAX_GRID
        kinds.add(f"{kernel.fn.__name__} {types} {options}")

    def drawn(
        ops: TritonSamplingOps, logits: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draw(ops, logits, *rest)
        return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))  # no kernel has drawn

    JITFunction.run = launch
    TritonSamplingOps.draw = drawn  # type: ignore[assignment,method-assign]
    return kinds


def warm_up(options: dict[str, Any]) -> None:
    """Warms up as a GPU does at its start, over a pool of two blocks."""
    config = engine_config(**options)
    loaded = load_model(config.model)
    spec = spec_of(loaded, config.cache.block_size)
    pool = spec.allocate(2, loaded.device)
    GPUBackend(loaded, pool, spec.places, config, ALONE).warm_up()


def serve(options: dict[str, Any]) -> None:
    numbers, num_tokens = random.Random(0), 20 if "speculative_config" in options else 4
    beginning = [] if options.get("disable_cascade_attn", True) else [7] * 300
    with LLM(**options, num_gpu_blocks_override=3000, multiprocess=False) as llm:
        for count, shortest, longest in LENGTHS:
            for params in PARAMS:
                prompts = [
                    beginning[: 2000 - num_tokens - len(prompt)] + prompt
                    for prompt in _prompts(numbers, count, shortest, longest)
                ]
                said = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
                llm.generate(prompts, said, use_tqdm=False)


def _prompts(numbers: random.Random, count: int, shortest: int, longest: int) -> Iterator[list[int]]:
    for _ in range(count):
        yield numbers.choices(range(1000), k=numbers.randint(shortest, longest))


def main(folder: str, features: dict[str, Any]) -> None:
    for module in KERNELS:
        import_module(f"engine.worker.gpu.{module}")
    os.environ["TRITON_INTERPRET"] = "1"  # selects the kernels; the interpreter is no longer used
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # linears stay as on a GPU
    options: dict[str, Any] = {"model": folder, "device": "cpu", "attention_backend": "triton"}
    options |= {"load_format": "dummy"} | features
    limits = {"max_model_len": 2000, "max_num_seqs": 37, "max_num_batched_tokens": 512}
    kinds = record_launches()
    warm_up(options | limits)
    warmed_up = set(kinds)
    serve(options | limits)
    json.dump([len(warmed_up), sorted(kinds - warmed_up)], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
