"""Random loads of a whole engine, each answer compared with that of its prompt alone: settings, prompts that
share as much as they can, and their clients' actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.core.policy import PolicyFactory, fcfs, priority
from engine.frontend.llm import LLM
from engine.frontend.request_output import RequestOutput
from engine.records.messages import JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams

MAX_TOKENS = 6
NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest gap of two log-probabilities that count as equal. How a prompt is cut into steps changes roundings;
which of two such tokens is chosen is chance, and so is all that follows."""

POLICIES: dict[str, Callable[[], PolicyFactory]] = {
    "fcfs": lambda: fcfs,
    "priority": lambda: priority,
    "continuum": lambda: ContinuumPolicyFactory(ContinuumConfig()),
}


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt alone."""

    token_ids: list[int]
    is_near_tie: list[bool]
    """Whether another token was about as probable."""

    def agrees(self, token_ids: list[int]) -> bool:
        """Whether these are its first tokens, up to a near tie."""
        for token_id, own, is_near_tie in zip(token_ids, self.token_ids, self.is_near_tie, strict=False):
            if token_id != own:
                return is_near_tie
        return True


class Oracle:
    """An engine that keeps nothing between prompts, and runs one at a time."""

    def __init__(self, folder: Path, *, dtype: str, **options: Any) -> None:
        self._near_tie = NEAR_TIES[dtype]
        self._llm = LLM(
            str(folder),
            multiprocess=False,
            num_gpu_blocks_override=390,
            max_model_len=2048,
            enable_prefix_caching=False,
            dtype=dtype,
            **options,
        )
        self._params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answer(self, prompt: list[int]) -> Answer:
        key = tuple(prompt)
        if key not in self._answers:
            [output] = self._llm.generate([prompt], self._params, use_tqdm=False)
            [answer] = output.outputs
            assert answer.logprobs is not None
            tops = [place.top for place in answer.logprobs]
            is_near_tie = [best.logprob - next_best.logprob < self._near_tie for best, next_best in tops]
            self._answers[key] = Answer(answer.token_ids, is_near_tie)
        return self._answers[key]

    def close(self) -> None:
        self._llm.close()


@dataclass(frozen=True)
class Turn:
    """A client's request, and when it disconnects."""

    prompt: list[int]
    n: int
    num_tokens: int
    priority: int
    job: JobRef | None
    leaves_after: int | None
    """The number of steps; None: it waits for its answer."""


@dataclass(frozen=True)
class Load:
    """Turns in bursts, and the number of steps before each."""

    bursts: list[tuple[int, list[Turn]]]

    @property
    def longest(self) -> int:
        """The length of the longest prompt with its answer."""
        return max(len(turn.prompt) for _, turns in self.bursts for turn in turns) + MAX_TOKENS


@dataclass
class LoadDrawer:
    """Draws prompts that share prefixes, and end at a block boundary, or a token before or after it."""

    random: Random
    oracle: Oracle
    block_size: int
    root_lengths: tuple[int, int]
    prompts: list[list[int]] = field(default_factory=list)

    def draw(self, num_turns: int) -> Load:
        bursts: list[tuple[int, list[Turn]]] = []
        while num_turns > 0:
            burst = self._burst()
            bursts.append((self.random.choice((0, 1, 1, 2, 6)), burst))
            num_turns -= len(burst)
        return Load(bursts)

    def _burst(self) -> list[Turn]:
        """A few prompts, some of them several times: duplicates in one step."""
        burst: list[Turn] = []
        for _ in range(self.random.randint(1, 3)):
            prompt = self._prompt()
            self.prompts.append(prompt)
            burst += [self._turn(prompt) for _ in range(self.random.choice((1, 2, 3)))]
        return burst

    def _turn(self, prompt: list[int]) -> Turn:
        choose = self.random.choice
        return Turn(
            prompt=prompt,
            n=choose((1, 1, 3)),
            num_tokens=self.random.randint(1, MAX_TOKENS),
            priority=choose((0, 0, 1)),
            job=choose((None, JobRef("a"), JobRef("b"), JobRef("b", is_last_step=True))),
            leaves_after=choose((None, None, None, None, self.random.randint(0, 4))),
        )

    def _prompt(self) -> list[int]:
        kind = self.random.choice(("root", "cut", "cut", "cut", "turn"))
        if kind == "root" or not self.prompts:
            return self._at_a_border(self._tokens(self.random.randint(*self.root_lengths)))
        known = self.random.choice(self.prompts)
        if kind == "turn":
            known = known + self.oracle.answer(known).token_ids
        else:
            known = self._at_a_border(known)
        size = self.block_size
        suffix = self.random.choice((0, 0, 1, 1, 2, size - 1, size, size + 1))
        return (known + self._tokens(suffix))[: self.root_lengths[1]]

    def _at_a_border(self, tokens: list[int]) -> list[int]:
        """Cuts the tokens at a block boundary, or a token before or after it."""
        num_blocks = self.random.randint(1, max(1, len(tokens) // self.block_size))
        return tokens[: max(1, num_blocks * self.block_size + self.random.choice((-1, 0, 0, 1, 1)))]

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(5, 250) for _ in range(count)]


def wrong_answers(llm: LLM, load: Load, oracle: Oracle) -> list[str]:
    """Describes the engine's wrong answers."""
    client = _Clients(llm)
    for num_steps, turns in load.bursts:
        client.pass_steps(num_steps)
        for turn in turns:
            client.ask(turn)
    client.pass_steps(None)
    wrong = []
    for number, turn in client.turns.items():
        output = client.outputs.get(number)
        if output is None:
            assert turn.leaves_after is not None, "a request was lost"
            continue
        alone = oracle.answer(turn.prompt)
        for answer in output.outputs:
            given = answer.token_ids
            if len(given) != turn.num_tokens or not alone.agrees(given):
                wrong.append(
                    f"request {number} of {len(turn.prompt)} tokens: {given}, but alone {alone.token_ids}"
                )
    return wrong


class _Clients:
    """Clients that send requests; some disconnect before their answer."""

    def __init__(self, llm: LLM) -> None:
        self.turns: dict[str, Turn] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self._engine = llm.engine
        self._leaving: list[tuple[int, str]] = []
        self._num_steps = 0

    def ask(self, turn: Turn) -> None:
        number = str(len(self.turns))
        self.turns[number] = turn
        params = SamplingParams(
            n=turn.n,
            temperature=0.0 if turn.n == 1 else 1.0,
            top_k=0 if turn.n == 1 else 1,
            max_tokens=turn.num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        context = RequestContext(job=turn.job, priority=turn.priority)
        self._engine.add_request(number, turn.prompt, params, context)
        if turn.leaves_after is not None:
            self._leaving.append((self._num_steps + turn.leaves_after, number))

    def pass_steps(self, count: int | None) -> None:
        """Runs this many steps; None: as many as all requests need."""
        while self._engine.has_unfinished_requests() and count != 0:
            for output in self._engine.step():
                self.outputs[output.request_id] = output
            self._num_steps += 1
            count = None if count is None else count - 1
            for due, number in self._leaving:
                if due == self._num_steps and number not in self.outputs:
                    self._engine.abort_request(number)
