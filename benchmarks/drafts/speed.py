"""Measures decode speed on recorded text, with drafts and without, in turns in one process.

A batch of turns is computed once, so that the prefix cache has the prompts and the drafter has indexed them
like earlier turns. Then the turns are generated again, timed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.drafts.replay import BLOCK_SIZE
from benchmarks.drafts.texts import SpokenJob, TurnKind
from engine.frontend.llm import LLM
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams

SAID_TOKENS = 192
"""The most tokens of a turn that are generated; turns shorter than half of it are left out."""
WARM_UP_TOKENS = 12
PLAIN = "no drafts"
SUFFIX = "suffix"
NGRAM = "V1's n-gram of 5"
CONTENDERS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    SUFFIX: {"method": "suffix"},
    NGRAM: {"method": "ngram", "num_speculative_tokens": 16},
}
REPEATING = "write or edit"
RANDOM = "nothing repeats"
GOALS = {(REPEATING, 1): 1.8, (REPEATING, 8): 1.4}
LEAST = 0.98
"""The least share of the speed without drafts, on any text."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to generate; its ids are below the model's vocabulary size."""

    job_id: str
    prompt: list[int]
    said: list[int]


@dataclass(slots=True)
class Speeds:
    """Decode speeds of one kind of text and batch size, by contender, round after round."""

    text: str
    batch: int
    tok_s: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, name: str) -> float:
        """Returns a contender's speed over that without drafts: the median of the rounds."""
        return median(own / plain for own, plain in zip(self.tok_s[name], self.tok_s[PLAIN], strict=True))


def measure(
    folder: Path, jobs: Sequence[SpokenJob], batches: Sequence[int], rounds: int, context: int
) -> Iterator[Speeds]:
    """Yields the speeds, text by text and batch by batch."""
    turns = writing_turns(jobs, context)
    length = context + SAID_TOKENS + WARM_UP_TOKENS
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(
                LLM(
                    folder,
                    multiprocess=False,
                    max_model_len=length,
                    max_num_seqs=max(batches),
                    num_gpu_blocks_override=2 + max(batches) * (2 + length // BLOCK_SIZE),
                    speculative_config=config,
                )
            )
            for name, config in CONTENDERS.items()
        }
        for text in (REPEATING, RANDOM):
            for batch in batches:
                speeds = Speeds(text, batch)
                for number in range(rounds):
                    taken = [turns[(number * batch + i) % len(turns)] for i in range(batch)]
                    _measure_round(models, taken, speeds, number)
                yield speeds


def _measure_round(models: dict[str, LLM], turns: Sequence[Turn], speeds: Speeds, number: int) -> None:
    names = list(models)
    for name in names[number % len(names) :] + names[: number % len(names)]:
        said = [turn.said if speeds.text == REPEATING else _random_like(turn) for turn in turns]
        tok_s = _say(models[name], turns, said, f"{speeds.text} {speeds.batch} {number}")
        speeds.tok_s.setdefault(name, []).append(tok_s)
        print(f"{speeds.text}, batch {speeds.batch}: {name} {tok_s:.1f} tok/s", file=sys.stderr, flush=True)


def _say(llm: LLM, turns: Sequence[Turn], said: Sequence[list[int]], tag: str) -> float:
    """Returns tokens per second."""
    jobs = [JobRef(f"{tag} {index} {turn.job_id}") for index, turn in enumerate(turns)]
    prompts = [turn.prompt for turn in turns]
    llm.generate(prompts, [_params([0] * WARM_UP_TOKENS)] * len(turns), jobs=jobs, use_tqdm=False)
    begun_s = time.perf_counter()
    llm.generate(prompts, [_params(each) for each in said], jobs=jobs, use_tqdm=False)
    return sum(map(len, said)) / (time.perf_counter() - begun_s)


def _params(said: list[int]) -> SamplingParams:
    return SamplingParams(temperature=0.0, replay_token_ids=said, max_tokens=len(said), ignore_eos=True)


def _random_like(turn: Turn) -> list[int]:
    """Returns equally many tokens, none of which predicts the next one."""
    draw = random.Random(len(turn.prompt))
    known = sorted({*turn.prompt, *turn.said})
    return draw.choices(known, k=len(turn.said))


def writing_turns(jobs: Sequence[SpokenJob], context: int) -> list[Turn]:
    """Returns turns that write or edit files, one of each job before the next of any, with renumbered tokens.

    Tokens are numbered as they first occur, so that those of any tokenizer fit into the model's vocabulary.
    """
    numbers: dict[int, int] = {}
    by_job = [_turns_of(job, context) for job in jobs]
    turns = []
    while any(found := [list(islice(each, 1)) for each in by_job]):
        turns += [turn for some in found for turn in some]
    return [
        Turn(
            turn.job_id,
            [numbers.setdefault(token, len(numbers)) for token in turn.prompt],
            [numbers.setdefault(token, len(numbers)) for token in turn.said],
        )
        for turn in turns
    ]


def _turns_of(job: SpokenJob, context: int) -> Iterator[Turn]:
    history: list[int] = []
    for turn in job.turns:
        history += turn.told
        if turn.kind is TurnKind.WRITE and len(turn.said) * 2 > SAID_TOKENS:
            yield Turn(job.job_id, history[-context:], turn.said[:SAID_TOKENS])
        history += turn.said


def table(measured: Sequence[Speeds]) -> str:
    """Returns one row per text and batch size, in Markdown."""
    lines = ["| text | batch | " + " | ".join(CONTENDERS) + " | ratio | goal |", "|---|--:|" + "--:|" * 5]
    for speeds in measured:
        goal = GOALS.get((speeds.text, speeds.batch), LEAST)
        ratio = speeds.ratio(SUFFIX)
        verdict = "met" if ratio >= goal else "MISSED"
        cells = " | ".join(f"{median(speeds.tok_s[name]):.1f} tok/s" for name in CONTENDERS)
        lines.append(f"| {speeds.text} | {speeds.batch} | {cells} | {ratio:.2f} | {goal}: {verdict} |")
    return "\n".join(lines)
