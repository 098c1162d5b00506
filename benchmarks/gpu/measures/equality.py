"""Section ``equality``: scores the engine's greedy tokens with transformers.

Two correct computations may choose different tokens where the best two are nearly equal, so tokens are scored
by transformers' logits in fp32: how far below the best is the one that the engine chose?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.models import engine_options, own_dtype
from benchmarks.gpu.measures.reference import reference_model
from benchmarks.gpu.measures.verification import verified_tokens
from benchmarks.gpu.shapes import TimedModel
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams

EXACT_GAP = 1e-3
"""Largest gap of logits in fp32 that counts as a tie; their spread over a vocabulary is about 1."""
NEAR_TIE_GAP = 0.05
"""Gap of logits that is always allowed in bf16: a logit of 4 is rounded by up to 0.016."""
TIMES_THEIRS = 3.0
"""A bf16 gap is also allowed up to this multiple of the largest gap of the tokens that transformers itself
chooses in bf16."""

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: Tokens
    output: Tokens


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of chosen tokens below the best: [num_tokens]"""

    values: torch.Tensor

    @property
    def largest(self) -> float:
        return float(self.values.max())

    @property
    def told(self) -> str:
        return f"{int((self.values > 0).sum())} of {len(self.values)} tokens are not the best in fp32"


def run(bench: Bench) -> None:
    """Checks the small model in fp32, which has hardly any ties; then both models in the type they are served
    in; then the small model with drafts."""
    small = bench.sizes.small
    large = bench.sizes.large
    half = own_dtype(bench)
    for shape, dtype, judge in (
        (small, "float32", _check_exact),
        (small, half, _check_near),
        (large, half, _check_near),
    ):
        name = f"{shape.name}, {dtype}"
        with bench.case(name):
            answers, num_cached = _generate(bench, shape, dtype)
            bench.check(f"{name}: prompts found in the prefix cache", float(num_cached == 0), 0.0)
            bench.device.give_back()
            judge(bench, reference_model(bench, shape, dtype), answers, f"{name}: greedy tokens")
            bench.device.give_back()
    _check_drafts(bench)


def _check_drafts(bench: Bench) -> None:
    """Checks the small model in fp32 with drafts."""
    shape = bench.sizes.small
    dtype = "float32"
    name = f"{shape.name}, {dtype}, with drafts"
    with bench.case(name):
        said = verified_tokens(bench, shape, dtype)
        bench.device.give_back()
        none_of_a_kind = not said.num_accepted or not said.num_rejected
        note = f"{said.num_accepted} accepted, {said.num_rejected} rejected"
        bench.check(f"{name}: drafts accepted and rejected", float(none_of_a_kind), 0.0, note)
        answers = [Answer(*pair) for pair in zip(said.prompts, said.outputs, strict=True)]
        _check_exact(bench, reference_model(bench, shape, dtype), answers, f"{name}: greedy tokens")
        bench.device.give_back()


def _check_exact(bench: Bench, model: Any, answers: list[Answer], name: str) -> None:
    gaps = _gaps_of(model, answers, [answer.output for answer in answers])
    bench.check(name, gaps.largest, EXACT_GAP, gaps.told)


def _check_near(bench: Bench, model: Any, answers: list[Answer], name: str) -> None:
    """Checks the answers; ``model`` has the answers' type and is then converted to fp32."""
    theirs = [_logits(model, answer).argmax(dim=-1).tolist() for answer in answers]
    model = model.float()
    own_gap = _gaps_of(model, answers, theirs).largest
    gaps = _gaps_of(model, answers, [answer.output for answer in answers])
    note = f"{gaps.told}; the largest gap of what transformers itself chooses is {own_gap:.3f}"
    bench.check(name, gaps.largest, max(NEAR_TIE_GAP, TIMES_THEIRS * own_gap), note)


def _generate(bench: Bench, shape: TimedModel, dtype: str) -> tuple[list[Answer], int]:
    """Generates from prompts of all lengths at once, then from some that branch off from them; also returns
    how many of the latter's tokens were cached."""
    sizes = bench.sizes
    params = SamplingParams(
        temperature=0.0, max_tokens=sizes.equality_tokens, ignore_eos=True, detokenize=False
    )
    longest = max(sizes.equality_prompts) + sizes.equality_tokens
    options = engine_options(
        bench,
        shape,
        dtype,
        max_model_len=longest,
        max_num_seqs=len(sizes.equality_prompts),
        max_num_batched_tokens=sizes.chunk,
        num_gpu_blocks_override=2 * len(sizes.equality_prompts) * (longest // sizes.block_size + 2),
    )
    prompts = [_random_tokens(length, seed, shape) for seed, length in enumerate(sizes.equality_prompts)]
    again = [
        prompt[: 2 * len(prompt) // 3] + _random_tokens(len(prompt) // 4, 100 + seed, shape)
        for seed, prompt in enumerate(prompts)
        if len(prompt) >= 2 * sizes.block_size
    ]
    answers = []
    num_cached = 0
    with LLM(**options, multiprocess=not sizes.toy) as llm:
        for group in (prompts, again):
            for prompt, output in zip(group, llm.generate(group, params, use_tqdm=False), strict=True):
                answers.append(Answer(prompt, list(output.outputs[0].token_ids)))
                num_cached += output.num_cached_tokens or 0
    return answers, num_cached


def _random_tokens(count: int, seed: int, shape: TimedModel) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    tokens: Tokens = torch.randint(0, shape.vocab_size, (count,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def _logits(model: Any, answer: Answer) -> torch.Tensor:
    """Returns the logits before each token of the output: [num_tokens, vocab_size]"""
    tokens = torch.tensor([answer.prompt + answer.output[:-1]], device=model.device)
    logits: torch.Tensor = model(tokens, logits_to_keep=len(answer.output)).logits[0]
    return logits.float()


def _gaps_of(model: Any, answers: list[Answer], chosen: list[Tokens]) -> Gaps:
    """Returns the gaps of ``chosen`` tokens, each after the engine's own tokens before it."""
    gaps = []
    for answer, tokens in zip(answers, chosen, strict=True):
        logits = _logits(model, answer)
        own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        gaps.append((logits.amax(dim=-1) - own).cpu())
    return Gaps(torch.cat(gaps))
