"""Runs steps that verify drafts, by hand: right and wrong drafts of all lengths, eager and in graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.models import engine_options
from benchmarks.gpu.measures.plans import Decoding, Planner, ending
from benchmarks.gpu.shapes import TimedModel
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import Executor
from engine.frontend.llm import engine_config
from engine.worker.executor import UniProcExecutor

_MOST = 4
"""The most drafts of a sequence in a step."""

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """Tokens of sequences that were generated with drafts."""

    prompts: list[Tokens]
    outputs: list[Tokens]
    num_rejected: int
    num_accepted: int


def verified_tokens(bench: Bench, shape: TimedModel, dtype: str) -> VerifiedTokens:
    """Generates greedily from some prompts, with drafts made from the output without drafts."""
    sizes = bench.sizes
    num_tokens = bench.sizes.verified_tokens
    lengths = sizes.equality_prompts
    room = 2 * sizes.verified_tokens + _MOST + 1
    longest = max(lengths) + room
    options = engine_options(
        bench,
        shape,
        dtype,
        max_model_len=longest,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=max(sum(lengths), len(lengths) * (_MOST + 1)),
        num_gpu_blocks_override=len(lengths) * (longest // sizes.block_size + 2),
        async_scheduling=False,
        speculative_config={"num_speculative_tokens": _MOST},
    )
    executor = UniProcExecutor(engine_config(**options))
    planner = Planner(executor.info.num_gpu_blocks, sizes.block_size, shape.vocab_size)
    try:
        begun = planner.begin([(length, 0) for length in lengths], room=room)
        prompts = [request.prompt_token_ids for request in begun.scheduled_new_reqs]
        without = _Said.begin(executor, begun)
        for _ in range(num_tokens - 1):
            without.add(executor.submit(without.decoding.step()).result())
        executor.submit(without.decoding.end()).result()
        return _with_drafts(executor, planner.again(begun), prompts, without, num_tokens)
    finally:
        executor.shutdown()


@dataclass(frozen=True, slots=True)
class _Said:
    """Sequences and their output."""

    decoding: Decoding
    tokens: dict[str, Tokens]

    @classmethod
    def begin(cls, executor: Executor, begun: SchedulerOutput) -> _Said:
        said = cls(Decoding.of(begun), {req_id: [] for req_id in begun.num_scheduled_tokens})
        said.add(executor.submit(begun).result())
        return said

    def add(self, output: ModelRunnerOutput) -> None:
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.tokens[req_id] += tokens


def _with_drafts(
    executor: Executor, begun: SchedulerOutput, prompts: list[Tokens], without: _Said, num_tokens: int
) -> VerifiedTokens:
    said = _Said.begin(executor, begun)
    num_drafts = 0
    num_accepted = 0
    expected = list(without.tokens.values())
    for step in range(num_tokens):
        drafts = dict(_drafts(said, expected, step))
        output = executor.submit(said.decoding.verification(drafts)).result()
        said.decoding.verified(output)
        said.add(output)
        num_drafts += sum(map(len, drafts.values()))
        num_accepted += sum(len(tokens) - 1 for tokens in output.sampled_token_ids)
        if min(map(len, said.tokens.values())) >= num_tokens:
            break
    executor.submit(ending(said.tokens)).result()
    outputs = [tokens[:num_tokens] for tokens in said.tokens.values()]
    return VerifiedTokens(prompts, outputs, num_drafts - num_accepted, num_accepted)


def _drafts(said: _Said, expected: Sequence[Tokens], step: int) -> Iterator[tuple[str, Tokens]]:
    """Yields up to _MOST of the tokens generated at this place without drafts; in every third step the last
    is wrong. In the first step all sequences have _MOST."""
    for i, (req_id, tokens) in enumerate(said.tokens.items()):
        length = _MOST if step == 0 else (i + step) % (_MOST + 1)
        drafts = expected[i][len(tokens) :][:length]
        if drafts and (i + step) % 3 == 0:
            drafts = [*drafts[:-1], drafts[-1] ^ 1]
        if drafts:
            yield req_id, drafts
