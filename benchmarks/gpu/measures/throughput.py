"""Section ``throughput``: runs many requests at once here and in transformers' continuous batching.

The requests are those of nano-vllm's benchmark: 256 prompts of 100 to 1,024 random tokens, as many out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import ContinuousBatchingConfig

from benchmarks.gpu import goals
from benchmarks.gpu.measures.bench import Bench, first_lines
from benchmarks.gpu.measures.models import engine_options, own_dtype
from benchmarks.gpu.measures.peer import generate_by_transformers
from benchmarks.gpu.measures.reference import reference_model
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams

_SEED = 0
_TEMPERATURE = 0.6
_LARGEST_TOKEN = 10_000
_RESERVE_S = 8.0
"""Time that transformers needs to end if it has to be stopped."""


@dataclass(frozen=True, slots=True)
class Work:
    prompts: list[list[int]]
    num_outputs: list[int]
    """Tokens generated for each prompt."""

    def first(self, count: int) -> Work:
        return Work(self.prompts[:count], self.num_outputs[:count])

    @property
    def total_outputs(self) -> int:
        return sum(self.num_outputs)


def made_work(num_requests: int, shortest: int, longest: int, vocab_size: int) -> Work:
    """Makes random requests, the same on every machine."""
    numbers = random.Random(_SEED)
    largest = min(_LARGEST_TOKEN, vocab_size - 1)
    prompts = [
        [numbers.randint(0, largest) for _ in range(numbers.randint(shortest, longest))]
        for _ in range(num_requests)
    ]
    return Work(prompts, [numbers.randint(shortest, longest) for _ in range(num_requests)])


def run(bench: Bench) -> None:
    sizes = bench.sizes
    shape = bench.sizes.small
    work = made_work(sizes.num_requests, sizes.shortest, sizes.longest, shape.vocab_size)
    part = work.first(sizes.num_peer_requests)
    ours_s: list[float] = []
    with bench.case(f"{shape.name}, {sizes.num_requests} requests"):
        ours_s = _time_ours(bench, work, part)
    try:
        _time_theirs(bench, part, ours_s)
    except Exception as error:  # an error of transformers, not of ours
        bench.skip("transformers' continuous batching", first_lines(error))


def _time_ours(bench: Bench, work: Work, part: Work) -> list[float]:
    """Returns the seconds of ``part``; records those of all the work first."""
    sizes = bench.sizes
    shape = bench.sizes.small
    options = engine_options(
        bench,
        shape,
        max_model_len=2 * sizes.longest + sizes.block_size,
        max_num_seqs=sizes.num_requests,
        max_num_batched_tokens=sizes.step_tokens,
    )
    with LLM(**options) as llm:
        _generate(llm, work.first(1), 0.0)
        num_repeats = min(3, sizes.num_repeats)
        seconds = [_generate(llm, work, _TEMPERATURE) for _ in range(num_repeats)]
        of_part = [_generate(llm, part, 0.0) for _ in range(num_repeats)]
    lengths = [(len(prompt), count) for prompt, count in zip(work.prompts, work.num_outputs, strict=True)]
    bench.figure(
        f"{shape.name}, {sizes.num_requests} requests of {sizes.shortest} to {sizes.longest:,} in and out",
        "tok/s",
        [work.total_outputs / each for each in seconds],
        floor=work.total_outputs / bench.floors(shape).generation_s(lengths),
        goal=goals.THROUGHPUT,
        note=f"{work.total_outputs:,} tokens out, sampled at temperature {_TEMPERATURE}",
    )
    return of_part


def _generate(llm: LLM, work: Work, temperature: float) -> float:
    """Returns the seconds of generating with an empty prefix cache."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in work.num_outputs
    ]
    began_s = time.perf_counter()
    outputs = llm.generate(list(work.prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - began_s
    _require_all([len(output.outputs[0].token_ids) for output in outputs], work)
    return seconds


def _time_theirs(bench: Bench, part: Work, ours_s: Sequence[float]) -> None:
    bench.device.give_back()
    model = reference_model(bench, bench.sizes.small, own_dtype(bench))
    # On a host its cache would take all memory.
    config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64) if bench.sizes.toy else None
    limit_s = bench.time_left_s() - _RESERVE_S
    answer = generate_by_transformers(model, part.prompts, part.num_outputs, limit_s, config)
    _require_all(answer.num_outputs, part)
    count = len(part.prompts)
    note = f"the first {count} of the requests, greedy, {part.total_outputs:,} tokens out"
    bench.figure(
        f"transformers' continuous batching, {count} requests",
        "tok/s",
        [part.total_outputs / answer.seconds],
        note=note,
    )
    if ours_s:
        ours = [part.total_outputs / each for each in ours_s]
        bench.figure(f"ours, the same {count} requests", "tok/s", ours, note=note)
        bench.figure(
            "ours / transformers",
            "x",
            [answer.seconds / each for each in ours_s],
            goal=goals.AGAINST_TRANSFORMERS,
        )


def _require_all(counts: list[int], work: Work) -> None:
    if counts != work.num_outputs:
        raise RuntimeError(f"Asked for {work.total_outputs} tokens, got {sum(counts)}.")
