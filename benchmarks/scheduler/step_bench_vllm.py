"""Runs the cases of ``make bench-step`` on vLLM's own V1 scheduler: ``step_bench_vllm.py MODEL_FOLDER``.

Run it with an interpreter that has vLLM (written for 0.32); it imports none of our modules. Reads lines such
as "decode-32 200", a case and its steps, and answers each with a line of JSON: seconds of every repetition.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
NUM_BLOCKS = 40_000
WARM_UP_STEPS = 20

_hash = get_hash_fn_by_name("sha256")  # vLLM's default
init_none_hash(_hash)
HASHER = get_request_block_hasher(BLOCK_SIZE, _hash)


class Bench:
    """A scheduler with synthetic requests and tokens, statistics on, as in vLLM's server."""

    def __init__(self, model: str, max_num_seqs: int) -> None:
        self._random = random.Random(7)
        self._ids = itertools.count()
        config = _config(model, max_num_seqs)
        dtype = config.model_config.dtype
        kv = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=dtype)
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], kv)]
            ),
            block_size=BLOCK_SIZE,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
        )

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(300, 4000) for _ in range(count)]

    def request(self, tokens: list[int], max_tokens: int) -> Any:
        return Request(
            request_id=f"r{next(self._ids)}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=HASHER,
        )

    def step(self) -> float:
        """Runs one step, a token for each request that is due one; returns its seconds without the model."""
        began = perf_counter()
        plan = self.scheduler.schedule()
        planned = perf_counter()
        result = self._answer(plan)
        answered = perf_counter()
        self.scheduler.update_from_output(plan, result)
        return perf_counter() - answered + planned - began

    def _answer(self, plan: Any) -> Any:
        requests = self.scheduler.requests
        ids = list(plan.num_scheduled_tokens)
        done = [requests[i].num_computed_tokens >= requests[i].num_tokens for i in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[11] if d else [] for d in done],
        )

    def run_until_idle(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()


def _config(model: str, max_num_seqs: int) -> Any:
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    config.cache_config.block_size = BLOCK_SIZE  # a CPU build sets another
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


Samples = dict[str, list[float]]
"""Samples in seconds, by case."""


def decode(model: str, num_requests: int, num_steps: int) -> Samples:
    bench = Bench(model, max(num_requests, 16))
    for _ in range(num_requests):
        bench.scheduler.add_request(bench.request(bench.tokens(128), 4000))
    scheduler = bench.scheduler
    while scheduler.waiting or any(r.num_computed_tokens < r.num_tokens - 1 for r in scheduler.running):
        bench.step()
    for _ in range(WARM_UP_STEPS):
        bench.step()
    return {f"schedule + update, {num_requests} decoding": [bench.step() for _ in range(num_steps)]}


def admit_hit(model: str, num_repeats: int) -> Samples:
    bench = Bench(model, 16)
    samples = []
    for _ in range(num_repeats):
        base = bench.tokens(4096)
        bench.scheduler.add_request(bench.request(list(base), 1))
        bench.run_until_idle()
        tokens = base + bench.tokens(64)
        began = perf_counter()
        bench.scheduler.add_request(bench.request(tokens, 1))
        made = perf_counter() - began
        samples.append(made + bench.step())
        bench.run_until_idle()
        assert bench.scheduler.reset_prefix_cache()
    return {"admit a prompt with a hit of 4096 tokens": samples}


def hashing(model: str, num_repeats: int) -> Samples:
    bench = Bench(model, 1)
    samples = []
    for _ in range(num_repeats):
        request = bench.request(bench.tokens(8), 1)
        request._all_token_ids.extend(bench.tokens(4096 - 8))
        began = perf_counter()
        hashes = HASHER(request)
        samples.append(perf_counter() - began)
        assert len(hashes) == 4096 // BLOCK_SIZE
    return {"hash 4096 tokens": samples}


def pool(model: str, num_repeats: int) -> Samples:
    blocks = Bench(model, 1).scheduler.kv_cache_manager.block_pool
    got = list[float]()
    touched = list[float]()
    freed = list[float]()
    for _ in range(num_repeats):
        began = perf_counter()
        taken = blocks.get_new_blocks(256)
        got.append(perf_counter() - began)
        began = perf_counter()
        blocks.free_blocks(reversed(taken))
        freed.append(perf_counter() - began)
        began = perf_counter()
        blocks.touch(taken)
        touched.append(perf_counter() - began)
        blocks.free_blocks(reversed(taken))
    return {"get 256 blocks": got, "free 256 blocks": freed, "touch 256 blocks": touched}


CASES: dict[str, Callable[[str, int], Samples]] = {
    "decode-1": lambda model, steps: decode(model, 1, steps),
    "decode-32": lambda model, steps: decode(model, 32, steps),
    "decode-256": lambda model, steps: decode(model, 256, steps),
    "admit": lambda model, steps: admit_hit(model, steps // 4),
    "hash": lambda model, steps: hashing(model, steps // 4),
    "pool": lambda model, steps: pool(model, steps // 4),
}


def main(model: str) -> None:
    for line in sys.stdin:
        name, num_steps = line.split()
        measured = CASES[name](model, int(num_steps))
        cases = [{"case": case, "samples_s": samples} for case, samples in measured.items()]
        print(json.dumps({"version": vllm.__version__, "cases": cases}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
