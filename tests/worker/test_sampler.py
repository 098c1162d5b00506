"""Every sampling feature against transformers' own logits processors, or against its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.records.sampling_params import SamplingParams
from engine.worker.cpu.sampling_kernel import token_picker
from engine.worker.sampler import TokenPicker, TorchPicker, uniform
from tests.worker.sampling import (
    VOCAB_SIZE,
    Row,
    frequencies,
    new_sampler,
    picking_by,
    random_logits,
    sample_rows,
)

PICKERS: dict[str, Callable[[], TokenPicker]] = {"torch": TorchPicker, "compiled": token_picker}
LOGITS = random_logits(1)
BEST = LOGITS.argsort(descending=True).tolist()
Warper = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=PICKERS, autouse=True, scope="module")
def _picker(request: pytest.FixtureRequest) -> Iterator[None]:
    with picking_by(PICKERS[request.param]()):
        yield


def greedy_token(params: SamplingParams, output: list[int] | None = None) -> int:
    """The token of one request alone for LOGITS after some output."""
    row = Row(params, LOGITS.clone(), output=output or [])
    return int(sample_rows([row]).token_ids[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@settings(max_examples=20)
@given(
    vocab_size=st.integers(2**18, 2**18 + 1100),
    num_rows=st.integers(3, 6),
    shift=st.sampled_from([0.0, 3.0, -3.0, -50.0, -torch.inf]),
    seed=st.integers(0, 2**32),
)
def test_the_greedy_choice_is_the_first_of_the_best(
    dtype: torch.dtype, vocab_size: int, num_rows: int, shift: float, seed: int
) -> None:
    """The first of the best is chosen of few or many logits, in any number of parts, any sign, with ties."""
    random = np.random.default_rng(seed)
    numbers = random.integers(-8, 9, (num_rows, vocab_size)) / 2
    numbers[random.random(numbers.shape) < 1e-5] += 4.0
    numbers[0] += shift
    logits = torch.from_numpy(numbers).to(dtype)
    chosen = sample_rows([Row(SamplingParams(temperature=0.0), row.clone()) for row in logits]).token_ids
    assert chosen.tolist() == numbers.argmax(axis=1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [100, 2**19 + 5])
def test_logits_that_are_no_numbers_fail_their_row(dtype: torch.dtype, vocab_size: int) -> None:
    """NaN of either sign, anywhere, and infinity fail; -inf means impossible, and fails if all are."""
    logits = torch.full((7, vocab_size), 1.0, dtype=dtype)
    logits[:, 7] = 2.0
    logits[1, 50], logits[2, 60] = torch.nan, -torch.nan
    logits[3, 70], logits[4, 0] = torch.inf, -torch.inf
    logits[5] = -torch.inf
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.001)):
        output = sample_rows([Row(params, row.clone()) for row in logits])
        assert set(output.failed) == {1, 2, 3, 5}
        assert [output.token_ids[i] for i in (0, 4, 6)] == [7, 7, 7]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingParams(temperature=1.5), [TemperatureLogitsWarper(1.5)]),
        (SamplingParams(top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(top_p=0.6), [TopPLogitsWarper(0.6)]),
        (SamplingParams(min_p=0.2), [MinPLogitsWarper(0.2)]),
        (
            SamplingParams(temperature=0.8, min_p=0.05, top_k=12, top_p=0.8),
            [
                TemperatureLogitsWarper(0.8),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
    ids=["cool", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution_of_transformers(params: SamplingParams, warpers: list[Warper]) -> None:
    """The draws have the support of transformers' warpers, and their probabilities within five sigma."""
    scores = LOGITS[None].clone()
    for warper in warpers:
        scores = warper(torch.zeros((1, 1), dtype=torch.int64), scores)
    expected = scores.softmax(dim=-1)[0]
    num_draws = 20000
    drawn = frequencies(params, LOGITS, num_draws)
    sigma = (expected * (1 - expected) / num_draws).sqrt()
    assert not drawn[expected == 0].any()
    assert ((drawn - expected).abs() <= 5 * sigma + 2 / num_draws).all()


def test_repetition_penalty_is_that_of_transformers() -> None:
    """Prompt and output tokens are divided or multiplied by the penalty, as transformers does it."""
    prompt, output = BEST[:3], BEST[3:5]
    scores = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([prompt + output]), LOGITS[None].clone())
    row = Row(SamplingParams(temperature=0.0, repetition_penalty=3.0), LOGITS.clone(), prompt, output)
    assert sample_rows([row]).token_ids[0] == scores.argmax()


@given(
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=9),
)
def test_penalties_by_their_definition(
    presence: float, frequency: float, repetition: float, prompt: list[int], output: list[int]
) -> None:
    """Presence and frequency count the output alone, repetition the prompt too: token by token in Python."""
    expected = LOGITS.double().tolist()
    for token in set(prompt + output):
        expected[token] = (
            expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        )
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    chosen = int(sample_rows([Row(params, LOGITS.clone(), prompt, output)]).token_ids[0])
    assert expected[chosen] >= max(expected) - 1e-4


def test_logit_bias_moves_the_choice() -> None:
    """A bias is added to its tokens and to no other."""
    assert greedy_token(SamplingParams(temperature=0.0, logit_bias={BEST[9]: 50.0})) == BEST[9]
    assert greedy_token(SamplingParams(temperature=0.0, logit_bias={BEST[0]: -50.0})) == BEST[1]


def test_allowed_tokens_are_the_only_ones() -> None:
    """Nothing outside the allowed tokens is chosen, neither greedily nor by chance."""
    allowed = [BEST[7], BEST[30], BEST[40]]
    assert greedy_token(SamplingParams(temperature=0.0, allowed_token_ids=allowed)) == BEST[7]
    drawn = frequencies(SamplingParams(temperature=5.0, allowed_token_ids=allowed), LOGITS, 500)
    assert set(drawn.nonzero().flatten().tolist()) == set(allowed)


def test_bad_words_are_never_completed() -> None:
    """A one-token word is banned always, a longer one only after its own beginning in the output."""
    words = [[BEST[0]], [5, 6, BEST[1]]]
    params = SamplingParams(temperature=0.0, bad_words_token_ids=words)
    assert greedy_token(params) == BEST[1]
    assert greedy_token(params, output=[6, 5]) == BEST[1]
    assert greedy_token(params, output=[6]) == BEST[1]
    assert greedy_token(params, output=[9, 5, 6]) == BEST[2]


def test_min_tokens_masks_what_would_end_the_request() -> None:
    """EOS and stop tokens cannot come before ``min_tokens``, and can right after."""
    params = SamplingParams(temperature=0.0, min_tokens=2, eos_token_id=BEST[0], stop_token_ids=[BEST[1]])
    assert greedy_token(params) == BEST[2]
    assert greedy_token(params, output=[9]) == BEST[2]
    assert greedy_token(params, output=[9, 9]) == BEST[0]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, eos_token_id=BEST[0], ignore_eos=True)
    assert greedy_token(ignoring) == BEST[0]


def test_replay_emits_exactly_the_given_tokens() -> None:
    """Output position i gets the i-th forced token; past the end sampling goes on as usual."""
    params = SamplingParams(temperature=0.0, replay_token_ids=[40, 41])
    assert greedy_token(params) == 40
    assert greedy_token(params, output=[40]) == 41
    assert greedy_token(params, output=[40, 41]) == BEST[0]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_of_the_raw_logits(count: int) -> None:
    """The chosen token first with its rank, then the best ones, before temperature, bias and penalties."""
    params = SamplingParams(temperature=0.3, logit_bias={BEST[4]: 100.0}, logprobs=count, seed=1)
    entry = sample_rows([Row(SamplingParams(), LOGITS), Row(params, LOGITS.clone())]).logprobs[1]
    raw = LOGITS.log_softmax(dim=-1)
    assert entry.token_ids == [BEST[4], *BEST[:count]]
    assert entry.rank == 5
    assert entry.logprobs == pytest.approx(raw[entry.token_ids].tolist(), abs=1e-5)


def test_logprobs_of_a_replayed_token() -> None:
    """A forced token has the model's own log-probability."""
    params = SamplingParams(temperature=0.0, replay_token_ids=[BEST[3]], logprobs=1)
    entry = sample_rows([Row(params, LOGITS.clone())]).logprobs[0]
    assert entry.token_ids == [BEST[3], BEST[0]]
    assert entry.rank == 4


ALL_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=4, temperature=0.5, top_k=7),
    SamplingParams(seed=4, top_p=0.4),
    SamplingParams(seed=5, min_p=0.3),
    SamplingParams(seed=6, repetition_penalty=1.7, presence_penalty=1.0),
    SamplingParams(seed=-7, frequency_penalty=-1.5),
    SamplingParams(temperature=0.0, logit_bias={3: 9.0}),
    SamplingParams(seed=8, allowed_token_ids=[1, 2, 3]),
    SamplingParams(seed=9, bad_words_token_ids=[[BEST[0]]]),
    SamplingParams(seed=2**63 - 1, min_tokens=9, stop_token_ids=[BEST[0]]),
    SamplingParams(seed=10, replay_token_ids=[11] * 9),
    SamplingParams(seed=11, logprobs=3),
)


def test_a_mixed_batch_gives_each_request_the_same_as_alone() -> None:
    """No request's choice depends on others in the batch."""
    rows = [
        Row(params, random_logits(i), prompt=[i, i + 1], output=list(range(i % 5)))
        for i, params in enumerate(ALL_KINDS)
    ]
    alone = [sample_rows([Row(r.params, r.logits.clone(), r.prompt, r.output)]) for r in rows]
    together = sample_rows(rows)
    assert together.token_ids.tolist() == [int(output.token_ids[0]) for output in alone]
    assert together.logprobs == {len(ALL_KINDS) - 1: alone[-1].logprobs[0]}


def test_a_seed_fixes_the_draw_of_a_position() -> None:
    """The draw depends on seed and output position, not on the sampler's history; positions differ."""
    sampler = new_sampler(0)
    row = Row(SamplingParams(seed=5), torch.zeros(VOCAB_SIZE))
    first = sample_rows([row], sampler).token_ids[0]
    sample_rows([Row(SamplingParams(), torch.zeros(VOCAB_SIZE))] * 3, sampler)
    assert sample_rows([row], sampler).token_ids[0] == first
    later = [sample_rows([Row(row.params, row.logits, output=[1] * n)]).token_ids[0] for n in range(20)]
    assert len(set(later)) > 5


def test_unseeded_requests_follow_the_engine_seed() -> None:
    """Two engines with one seed draw alike, with another seed they do not; requests draw apart."""
    rows = [Row(SamplingParams(), torch.zeros(VOCAB_SIZE)) for _ in range(20)]
    first, again, other = (sample_rows(rows, new_sampler(seed)).token_ids.tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) > 5


def test_seeded_draws_are_uniform() -> None:
    """Over seeds and over positions the draws fill [0, 1) evenly."""
    many = np.arange(20000, dtype=np.int64)
    for draws in (uniform(many, np.zeros_like(many)), uniform(np.full_like(many, 42), many)):
        assert draws.min() >= 0
        assert draws.max() < 1
        histogram, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert abs(histogram - 1000).max() < 150


def test_everything_masked_still_gives_a_token() -> None:
    """Constraints that leave no token end in some token, not in a crash of the step."""
    params = SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]])
    assert 0 <= sample_rows([Row(params, LOGITS.clone())]).token_ids[0] < VOCAB_SIZE
