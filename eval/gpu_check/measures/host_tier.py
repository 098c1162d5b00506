"""Section ``host-tier``: a long history whose KV went to host memory comes back, or is computed again."""

from __future__ import annotations

import time

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from eval.gpu_check import goals
from eval.gpu_check.measures.bench import Bench
from eval.gpu_check.measures.models import engine_options

_TOLERATED_SHARE = 0.02
"""Of a history's tokens, that are computed though they might have been found."""
_FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def run(bench: Bench) -> None:
    """Two histories in a pool that holds one: each return finds its KV on the host. Then the same without a
    host tier."""
    with bench.case("host tier"):
        reloaded_s = _times(bench, with_host_tier=True)
        computed_s = _times(bench, with_host_tier=False)
        _report(bench, reloaded_s, computed_s)


def _times(bench: Bench, *, with_host_tier: bool) -> list[float]:
    """Seconds to the first token of a history's return."""
    sizes, shape = bench.sizes, bench.sizes.large
    blocks_each = sizes.history // sizes.block_size + 2
    options = engine_options(
        bench,
        shape,
        max_model_len=sizes.history + sizes.block_size,
        max_num_seqs=2,
        max_num_batched_tokens=sizes.prefill,
        num_gpu_blocks_override=blocks_each + 2,
        num_host_blocks_override=3 * blocks_each if with_host_tier else None,
        enable_prefix_caching=with_host_tier,
    )
    bench.device.free_bytes()
    histories = [_history(bench, seed) for seed in range(2)]
    with LLM(**options, multiprocess=not sizes.toy) as llm:
        for history in histories:
            _first_token(llm, history)
        timed = [_first_token(llm, histories[turn % 2]) for turn in range(sizes.num_repeats)]
    expected = sizes.history - sizes.block_size if with_host_tier else 0
    cached = [num_cached for _, num_cached in timed]
    name = "histories found on the host" if with_host_tier else "histories computed without a host tier"
    wrong = max(abs(each - expected) / sizes.history for each in cached)
    bench.check(name, wrong, _TOLERATED_SHARE, f"tokens found: {cached}")
    return [seconds for seconds, _ in timed]


def _history(bench: Bench, seed: int) -> list[int]:
    vocab_size = bench.sizes.large.vocab_size
    return [(seed * 977 + 31 * place + place // 97) % vocab_size for place in range(bench.sizes.history)]


def _first_token(llm: LLM, history: list[int]) -> tuple[float, int]:
    """Seconds, and how many tokens were found."""
    began_s = time.perf_counter()
    (output,) = llm.generate([history], _FIRST_TOKEN, use_tqdm=False)
    return time.perf_counter() - began_s, output.num_cached_tokens or 0


def _report(bench: Bench, reloaded_s: list[float], computed_s: list[float]) -> None:
    sizes, floors = bench.sizes, bench.floors(bench.sizes.large)
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
