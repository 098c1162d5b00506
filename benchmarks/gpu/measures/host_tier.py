"""Section ``host-tier``: compares loading a long history's KV from host memory with recomputing it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.gpu import goals
from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.models import engine_options
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams

_TOLERATED_SHARE = 0.02
"""Tolerated share of a history's tokens."""
_FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class Visit:
    """One request with a history, which generates one token."""

    seconds: float
    num_found: int
    """Tokens of the history that were cached."""


def run(bench: Bench) -> None:
    with bench.case("host tier"):
        new, returned = _visits(bench)
        _check_found(bench, new, returned)
        _report(bench, [visit.seconds for visit in new], [visit.seconds for visit in returned])


def _visits(bench: Bench) -> tuple[list[Visit], list[Visit]]:
    """Returns visits of new histories and, after each, of the one before: the pool holds one only."""
    sizes = bench.sizes
    shape = bench.sizes.large
    blocks_each = sizes.history // sizes.block_size + 2
    options = engine_options(
        bench,
        shape,
        max_model_len=sizes.history + sizes.block_size,
        max_num_seqs=2,
        max_num_batched_tokens=sizes.prefill,
        num_gpu_blocks_override=blocks_each + 2,
        num_host_blocks_override=4 * blocks_each,
    )
    new = []
    returned = []
    with LLM(**options, multiprocess=not sizes.toy) as llm:
        last = _history(bench, seed=0)
        _visit(llm, last)
        for seed in range(1, sizes.num_repeats + 1):
            history = _history(bench, seed)
            new.append(_visit(llm, history))
            returned.append(_visit(llm, last))
            last = history
    return new, returned


def _check_found(bench: Bench, new: list[Visit], returned: list[Visit]) -> None:
    """Checks the shares found; the last token of a prompt is always computed, and with it its block."""
    history = bench.sizes.history
    missed = [1 - visit.num_found / (history - bench.sizes.block_size) for visit in returned]
    note = f"tokens found: {[visit.num_found for visit in returned]} of {history:,}"
    bench.check("histories that return: share not found", max(missed), _TOLERATED_SHARE, note)
    found = max(visit.num_found / history for visit in new)
    bench.check("new histories: share found", found, _TOLERATED_SHARE)


def _history(bench: Bench, seed: int) -> list[int]:
    vocab_size = bench.sizes.large.vocab_size
    return [(seed * 977 + 31 * place + place // 97) % vocab_size for place in range(bench.sizes.history)]


def _visit(llm: LLM, history: list[int]) -> Visit:
    began_s = time.perf_counter()
    (output,) = llm.generate([history], _FIRST_TOKEN, use_tqdm=False)
    return Visit(time.perf_counter() - began_s, output.num_cached_tokens)


def _report(bench: Bench, computed_s: list[float], reloaded_s: list[float]) -> None:
    sizes = bench.sizes
    floors = bench.floors(bench.sizes.large)
    name = f"{sizes.large.name}, {sizes.history:,} tokens: "
    bench.figure(
        f"{name}first token after a reload",
        "ms",
        [1e3 * each for each in reloaded_s],
        floor=1e3 * floors.reload_s(sizes.history),
    )
    bench.figure(
        f"{name}first token, all computed",
        "ms",
        [1e3 * each for each in computed_s],
        floor=1e3 * floors.prefill_s(sizes.history),
    )
    ratios = [computed / reloaded for computed, reloaded in zip(computed_s, reloaded_s, strict=True)]
    bench.figure(f"{name}computed / reloaded", "x", ratios, goal=goals.RELOAD)
