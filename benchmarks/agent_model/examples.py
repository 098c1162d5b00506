"""Conversations as tokens, in batches of similar length, with their training targets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.agent_model.dialogues import Dialogue, draw_dialogues
from benchmarks.agent_model.tokenizer import rendered, token_id

MAX_TOKENS = 3000
IGNORED = -100
"""The target of a token that is not learned."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation after the shared prefix."""

    tokens: np.ndarray
    targets: np.ndarray
    """The next token if the model should generate it, else ``IGNORED``."""
    tools: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations of similar length: [batch, length] each, padded at the end."""

    tokens: Tensor
    targets: Tensor
    tools: bool


class Encoder:
    """Renders a dialogue with the chat template and cuts off the part that all dialogues with tools share."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = (token_id(tokenizer, token) for token in ("<|im_start|>", "<|im_end|>"))
        self._speaker = tokenizer.encode("assistant\n", add_special_tokens=False)
        one, other = (self._tokens(_probe(text)) for text in ("a", "b"))
        same = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        self.prefix = one[: one[:same].index(self._end)]
        """Tokens up to where a client's system text would begin."""

    def example(self, dialogue: Dialogue) -> Example | None:
        """Returns None if the conversation is too long."""
        tokens = self._tokens(dialogue)
        if len(tokens) > MAX_TOKENS:
            return None
        targets = self._targets(tokens, dialogue.learned)
        start = len(self.prefix) if dialogue.tools else 0
        return Example(
            np.array(tokens[start:-1], np.int32), np.array(targets[start:], np.int32), dialogue.tools
        )

    def _tokens(self, dialogue: Dialogue) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(
            rendered(self._tokenizer, dialogue), add_special_tokens=False
        )
        return tokens

    def _targets(self, tokens: Sequence[int], learned: Sequence[bool]) -> list[int]:
        """Returns for each token but the last the next token, if the assistant generates it."""
        targets = [IGNORED] * (len(tokens) - 1)
        spoken = iter(learned)
        for at, token in enumerate(tokens):
            begin = at + 1 + len(self._speaker)
            if token != self._start or list(tokens[at + 1 : begin]) != self._speaker:
                continue
            end = tokens.index(self._end, begin)
            if next(spoken):
                targets[begin - 1 : end] = tokens[begin : end + 1]
        return targets


def _probe(text: str) -> Dialogue:
    return Dialogue(({"role": "user", "content": text},), ())


def make_examples(folder: Path, seed: int, count: int, held_out: bool = False) -> list[Example]:
    """Makes ``count`` conversations with the tokenizer in ``folder``, in two processes."""
    with ProcessPoolExecutor(2) as pool:
        halves = pool.map(_make, [folder] * 2, [2 * seed, 2 * seed + 1], [count // 2] * 2, [held_out] * 2)
        return [example for half in halves for example in half]


def _make(folder: Path, seed: int, count: int, held_out: bool) -> list[Example]:
    encoder = Encoder(PreTrainedTokenizerFast.from_pretrained(folder))
    made = (encoder.example(dialogue) for dialogue in islice(draw_dialogues(seed, held_out), count))
    return [example for example in made if example is not None]


def batches(examples: Sequence[Example], max_tokens: int, rng: random.Random) -> Iterator[Batch]:
    """Yields all examples once, in random order, each with others of similar length."""
    order = sorted(examples, key=lambda e: (e.tools, len(e.tokens) + rng.randrange(16)))
    groups: list[list[Example]] = [[]]
    for example in order:
        group = groups[-1]
        longest = max([len(e.tokens) for e in group] + [len(example.tokens)])
        if group and (group[0].tools != example.tools or longest * (len(group) + 1) > max_tokens):
            groups.append(group := [])
        group.append(example)
    rng.shuffle(groups)
    return map(_batch, groups)


def _batch(examples: Sequence[Example]) -> Batch:
    length = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), length, dtype=torch.int64)
    targets = torch.full((len(examples), length), IGNORED, dtype=torch.int64)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
        targets[row, : len(example.targets)] = torch.from_numpy(example.targets)
    return Batch(tokens, targets, examples[0].tools)
