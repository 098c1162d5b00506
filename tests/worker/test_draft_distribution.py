"""Tokens in steps with drafts have the model's distribution, however often drafts are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBackend
from engine.worker.cpu.input_batch import InputBatch
from engine.worker.cpu.model_runner import ModelRunner
from engine.worker.sampler import Sampler

pytestmark = pytest.mark.slow

VOCAB_SIZE, NUM_DRAFTS, NUM_REQUESTS, NUM_STEPS = 6, 3, 1024, 5
START = 0
LOGITS = 1.5 * torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(4))
"""[previous token, next token]"""
LIKELY: list[int] = LOGITS.argmax(dim=-1).tolist()
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7, "min_p": 0.1},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.5},
    "counted": {"frequency_penalty": 0.4, "presence_penalty": 0.6},
    "all": {
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.03,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
    },
}
Numbers = npt.NDArray[np.float64]


class MarkovModel:
    """A CausalModel without layers, whose next token depends on the last one alone."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        return LOGITS[input_ids[sample_rows]]


class NoAttention:
    """The attention of a model without layers."""

    def begin_step(self, batch: object) -> None:
        """Has nothing to prepare."""


class MarkovEngine:
    """Many requests that begin with START, all at the same place, with steps planned by hand."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        batch = InputBatch(NUM_REQUESTS, 64, 64, VOCAB_SIZE)
        model: Any = MarkovModel()
        attention: Any = NoAttention()
        self._runner = ModelRunner(model, attention, batch, Sampler(seed), torch.device("cpu"))
        self._names = [f"r{i}" for i in range(NUM_REQUESTS)]
        self.tokens = {name: [START] for name in self._names}
        new = [NewRequestData(name, [START], params, [i], 0) for i, name in enumerate(self._names)]
        self._run(new, CachedRequestData(), {})

    def step(self, drafts: dict[str, list[int]]) -> None:
        """Runs the next step, with drafts of some requests."""
        computed = [len(self.tokens[name]) - 1 for name in self._names]
        blocks: list[list[int]] = [[] for _ in self._names]
        cached = CachedRequestData(req_ids=self._names, new_block_ids=blocks, num_computed_tokens=computed)
        self._run([], cached, drafts)

    def _run(
        self, new: list[NewRequestData], cached: CachedRequestData, drafts: dict[str, list[int]]
    ) -> None:
        scheduled = {name: 1 + len(drafts.get(name, ())) for name in self._names}
        plan = SchedulerOutput(
            new,
            cached,
            scheduled,
            sum(scheduled.values()),
            set(),
            set(),
            scheduled_spec_decode_tokens=drafts,
        )
        output = self._runner.execute_model(plan)
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.tokens[name] += tokens


def drafts_behind(tokens: dict[str, list[int]], random: np.random.Generator) -> dict[str, list[int]]:
    """Drafts, half of them likely and half random; one request in eight has none, most have the maximum."""
    drafts = {}
    for i, (name, known) in enumerate(tokens.items()):
        draft = [known[-1]]
        while len(draft) <= NUM_DRAFTS:
            is_likely = random.random() < 0.5
            draft.append(LIKELY[draft[-1]] if is_likely else int(random.integers(VOCAB_SIZE)))
        if length := min(i % 8, NUM_DRAFTS):
            drafts[name] = draft[1 : 1 + length]
    return drafts


class Target:
    """The distribution of the next token after START and some output, according to the parameters."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._known: dict[tuple[int, ...], Numbers] = {}

    def probabilities(self, tokens: list[int]) -> Numbers:
        """[vocab_size]"""
        said = np.bincount(tokens[1:], minlength=VOCAB_SIZE)
        key = (tokens[-1], *said.tolist())
        if key not in self._known:
            self._known[key] = self._kept(self._penalized(tokens[-1], said))
        return self._known[key]

    def _penalized(self, last: int, said: npt.NDArray[np.int64]) -> Numbers:
        logits: Numbers = LOGITS[last].double().numpy().copy()
        seen = said > 0
        seen[START] = True
        factor = self._params.repetition_penalty
        logits[seen] = np.where(logits > 0, logits / factor, logits * factor)[seen]
        logits -= self._params.frequency_penalty * said + self._params.presence_penalty * (said > 0)
        return logits

    def _kept(self, logits: Numbers) -> Numbers:
        """Applies temperature, min-p, top-k and top-p, in the order of V1."""
        params = self._params
        p = np.exp(logits / params.temperature)
        p[p < params.min_p * p.max()] = 0
        best = np.argsort(-p)[: params.top_k if params.top_k > 0 else VOCAB_SIZE]
        reached = np.cumsum(p[best]) / p[best].sum()
        best = best[: int(np.searchsorted(reached, params.top_p)) + 1]
        left = np.zeros_like(p)
        left[best] = p[best] / p[best].sum()
        return left


def samples(params: SamplingParams) -> Iterator[tuple[int, list[int], int]]:
    """Yields each sampled token with its place in the step and the tokens before it."""
    random = np.random.default_rng(7)
    for seed in range(2):
        engine = MarkovEngine(params, seed)
        for _ in range(NUM_STEPS):
            before = {name: len(tokens) for name, tokens in engine.tokens.items()}
            engine.step(drafts_behind(engine.tokens, random))
            for name, tokens in engine.tokens.items():
                for place in range(before[name], len(tokens)):
                    yield place - before[name], tokens[:place], tokens[place]


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_that_of_the_model(kind: str) -> None:
    """A chi-squared test at 5 sigma for each place of a step with drafts, given the previous token. Penalties
    count accepted drafts only."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, **KINDS[kind]})
    target = Target(params)
    differences = np.zeros((NUM_DRAFTS + 1, VOCAB_SIZE, VOCAB_SIZE))
    covariances = np.zeros((NUM_DRAFTS + 1, VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE))
    for place, known, token in samples(params):
        p = target.probabilities(known)
        assert p[token] > 0, "a token that the parameters leave out"
        differences[place, known[-1]] -= p
        differences[place, known[-1], token] += 1
        covariances[place, known[-1]] += np.diag(p) - np.outer(p, p)
    for place in range(NUM_DRAFTS + 1):
        deviation = chi_squared_deviation(differences[place], covariances[place])
        assert deviation < 5, f"place {place}: {deviation:.1f} sigma"


def chi_squared_deviation(differences: Numbers, covariances: Numbers) -> float:
    """Deviation of the statistic from its mean, in standard deviations.

    differences [previous token, next token]: counts minus their expectation, given each draw's own history;
    covariances [previous token, next token, next token]: of these. Tokens expected fewer than five times are
    left out.
    """
    statistic, freedom = 0.0, 0
    for difference, covariance in zip(differences, covariances, strict=True):
        often = np.diag(covariance) >= 5
        if often.sum() < 2:
            continue
        inverse = np.linalg.pinv(covariance[np.ix_(often, often)], rcond=1e-9, hermitian=True)
        statistic += float(difference[often] @ inverse @ difference[often])
        freedom += int(np.linalg.matrix_rank(covariance[np.ix_(often, often)], tol=1e-6, hermitian=True))
    assert freedom >= 4, "too few counts"
    return float((statistic - freedom) / np.sqrt(2 * freedom))
