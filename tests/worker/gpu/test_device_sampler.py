"""Sampling on the device: the choices of the host's sampler, draws by their exact probabilities, and no
influence of a row on others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.records.sampling_params import SamplingParams
from engine.worker.gpu import triton_sampling
from engine.worker.gpu.device_sampler import MAX_LISTED, DeviceSampler, Sampled
from engine.worker.gpu.sampling_ops import SamplingOps
from engine.worker.gpu.staging import Staging
from engine.worker.gpu.streams import HostStreams
from engine.worker.gpu.torch_sampling import TorchSamplingOps, exponential, random_bits
from engine.worker.gpu.triton_sampling import TritonSamplingOps
from engine.worker.sampler import Sampler, TokenBitmask
from engine.worker.sampling_batch import SamplingTable
from tests.worker.gpu.sm90 import MAX_SHARED_BYTES, KernelBuild, compile_all_for_sm90
from tests.worker.sampling import VOCAB_SIZE, Row, random_logits

LOGITS = random_logits(1)
DEVICE = torch.device("cpu")
BOTH_OPS = pytest.mark.parametrize("ops", [TorchSamplingOps(), TritonSamplingOps()], ids=["torch", "triton"])


class HostAndDevice:
    """The same rows for both samplers."""

    def __init__(self, rows: list[Row], ops: SamplingOps, forbidden: TokenBitmask | None = None) -> None:
        vocab_size = len(rows[0].logits)
        longest = max(len(row.prompt) + len(row.output) for row in rows)
        self._table = SamplingTable(len(rows), vocab_size)
        self._history = np.zeros((len(rows), longest + 1), dtype=np.int64)
        self._num_tokens = np.zeros(len(rows), dtype=np.int64)
        for i, row in enumerate(rows):
            tokens = row.prompt + row.output
            self._history[i, : len(tokens)] = tokens
            self._num_tokens[i] = len(tokens)
            self._table.set_row(i, row.params, len(row.prompt))
        self._logits = torch.stack([row.logits for row in rows])
        self._forbidden = forbidden
        self._sampler = DeviceSampler(0, vocab_size, ops, HostStreams())

    def on_host(self) -> tuple[list[int], dict[int, tuple[list[int], int]]]:
        """Tokens; ids and rank of the log-probabilities."""
        batch = self._table.batch(np.arange(len(self._logits)), self._num_tokens)
        output = Sampler(0).sample(self._logits.clone(), batch, self._history, self._forbidden)
        told = {i: (entry.token_ids, entry.rank) for i, entry in output.logprobs.items()}
        return output.token_ids.tolist(), told

    def failed_on_host(self) -> Mapping[int, str]:
        batch = self._table.batch(np.arange(len(self._logits)), self._num_tokens)
        return Sampler(0).sample(self._logits.clone(), batch, self._history, self._forbidden).failed

    def on_device(self) -> Sampled:
        batch = self._table.batch(np.arange(len(self._logits)), self._num_tokens)
        staging = Staging(self._sampler.staged_words(len(self._logits)), DEVICE, HostStreams())
        staging.begin()
        sampling = self._sampler.stage(batch, staging)
        staging.send()
        history = torch.from_numpy(self._history).int()
        return self._sampler.sample(self._logits.clone(), sampling, history, self._forbidden)


def drawn(rows: list[Row], ops: SamplingOps | None = None) -> list[int]:
    tokens: list[int] = HostAndDevice(rows, ops or TorchSamplingOps()).on_device().token_ids.tolist()
    return tokens


TOKENS = st.integers(0, VOCAB_SIZE - 1)
GREEDY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    logit_bias=st.none() | st.dictionaries(TOKENS, st.floats(-9, 9, width=32), max_size=3),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=9, unique=True),
    bad_words_token_ids=st.none() | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(TOKENS, max_size=2),
    replay_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=3),
    logprobs=st.none() | st.integers(0, 3),
)
ROWS = st.builds(
    Row,
    params=GREEDY_PARAMS,
    logits=st.integers(0, 99).map(random_logits),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    output=st.lists(st.integers(0, 3), max_size=6),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=4), forbids=st.booleans())
def test_features_choose_what_the_host_chooses(rows: list[Row], forbids: bool) -> None:
    """Penalties, biases, bans, minimum lengths, grammars, replay and log-probabilities, alone and mixed."""
    mask = np.zeros((1, VOCAB_SIZE), dtype=np.bool_)
    mask[0, : VOCAB_SIZE // 2] = True
    both = HostAndDevice(rows, TorchSamplingOps(), TokenBitmask([len(rows) - 1], mask) if forbids else None)
    tokens, told = both.on_host()
    sampled = both.on_device()
    assert sampled.token_ids.tolist() == tokens
    if not told:
        assert sampled.logprobs is None
        return
    assert sampled.logprobs is not None
    lines = zip(sampled.logprobs.token_ids.tolist(), sampled.logprobs.ranks.tolist(), strict=True)
    for (ids, rank), (host_ids, host_rank) in zip(lines, told.values(), strict=True):
        assert (ids[: len(host_ids)], rank) == (host_ids, host_rank)


@BOTH_OPS
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_with_nothing_to_choose_are_told(ops: SamplingOps, temperature: float) -> None:
    """A score that is not finite marks the rows that fail on the host; other rows are unaffected, and every
    token is in the vocabulary."""
    params = SamplingParams(temperature=temperature, seed=5)
    sound = Row(params, LOGITS)
    with_nan, with_inf = LOGITS.clone(), LOGITS.clone()
    with_nan[3], with_inf[9] = -torch.nan, torch.inf
    forbidden = SamplingParams(
        temperature=temperature, seed=5, allowed_token_ids=[4], bad_words_token_ids=[[4]]
    )
    rows = [sound, Row(params, with_nan), sound, Row(params, with_inf), Row(forbidden, LOGITS), sound]
    both = HostAndDevice(rows, ops)
    sampled = both.on_device()
    assert sampled.scores is not None
    finite = sampled.scores.isfinite().tolist()
    assert finite == [True, False, True, False, False, True]
    assert sampled.scores[4] == -torch.inf
    assert set(both.failed_on_host()) == {1, 3, 4}
    assert drawn([sound], ops) == sampled.token_ids[[0]].tolist() == sampled.token_ids[[5]].tolist()
    assert all(0 <= token < VOCAB_SIZE for token in sampled.token_ids.tolist())


def test_a_bad_word_beyond_the_vocabulary_bans_nothing() -> None:
    """Such a word bans nothing in its own row, nor the next row's first token, which is at its address."""
    first = LOGITS.clone()
    first[0] = 99.0
    word = SamplingParams(temperature=0.0, bad_words_token_ids=[[VOCAB_SIZE], [1, VOCAB_SIZE]])
    rows = [Row(word, LOGITS, output=[1]), Row(SamplingParams(temperature=0.0), first)]
    assert drawn(rows) == [int(LOGITS.argmax()), 0]
    assert HostAndDevice(rows, TorchSamplingOps()).on_host()[0] == [int(LOGITS.argmax()), 0]


def test_logprobs_are_of_the_raw_logits() -> None:
    """The chosen token comes first, then the best, from logits before the request's changes."""
    params = SamplingParams(temperature=0.0, logit_bias={5: 100.0}, logprobs=2)
    logprobs = HostAndDevice([Row(params, LOGITS)], TorchSamplingOps()).on_device().logprobs
    assert logprobs is not None
    expected = LOGITS.double().log_softmax(dim=-1)
    assert logprobs.token_ids[0].tolist() == [5, *LOGITS.topk(2).indices.tolist()]
    torch.testing.assert_close(logprobs.values[0].double(), expected[logprobs.token_ids[0]])


def warped(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """The logits that transformers would draw from: [num_rows, vocab_size]"""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    none = torch.zeros((len(logits), 1), dtype=torch.int64)
    scores: torch.Tensor = warpers(none, logits.clone())  # type: ignore[arg-type]
    return scores


FILTERS = [
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=0.8, min_p=0.02, top_k=12, top_p=0.8),
]


@pytest.mark.slow
@BOTH_OPS
@pytest.mark.parametrize("params", FILTERS, ids=["top_k", "top_p", "min_p", "all"])
def test_filters_leave_what_transformers_leaves(params: SamplingParams, ops: SamplingOps) -> None:
    """The floor, found by bisection, cuts exactly between kept and filtered tokens."""
    logits = torch.stack([random_logits(seed) for seed in range(6)])
    num_rows = len(logits)
    temperature = torch.full((num_rows,), params.temperature)
    floors = ops.floors(
        logits,
        temperature,
        torch.full((num_rows,), params.top_k or VOCAB_SIZE, dtype=torch.int32),
        torch.full((num_rows,), params.top_p),
        torch.full((num_rows,), params.min_p),
    )
    kept = logits / temperature[:, None] >= floors[:, None]
    assert torch.equal(kept, warped(params, logits).isfinite())


@pytest.mark.slow
@pytest.mark.parametrize("params", [*FILTERS, SamplingParams(), SamplingParams(temperature=0.4)])
def test_draws_have_their_exact_probabilities(params: SamplingParams) -> None:
    """Chi-square of 40,000 draws at fixed seeds against the softmax that transformers leaves, at 5 sigma."""
    num_draws = 40_000
    expected = warped(params, LOGITS[None])[0].double().softmax(dim=-1) * num_draws
    tokens = drawn([Row(params, LOGITS)] * num_draws)
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE).double()
    assert not counts[expected == 0].any()
    common = expected >= 5
    statistic = ((counts - expected)[common].square() / expected[common]).sum().item()
    freedom = int(common.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_rare_token_is_drawn_as_often_as_it_should_be() -> None:
    """Among many unlikely tokens 24-bit random numbers favor none: a large, flat tail under a peak."""
    vocab_size, num_rows = 8_000, 500
    logits = torch.full((vocab_size,), -10.0)
    logits[0] = 0.0
    tail = 1 - logits.double().softmax(dim=-1)[0].item()  # 0.27
    tokens = np.array(drawn([Row(SamplingParams(), logits)] * num_rows))
    sigma = (tail * (1 - tail) / num_rows) ** 0.5
    assert abs((tokens != 0).mean() - tail) < 5 * sigma
    assert len(np.unique(tokens[tokens != 0])) > 0.95 * (tokens != 0).sum()


def test_listed_and_searched_filters_agree() -> None:
    """A small top-k is listed, a large one searched: both ways give the same tokens for the same seeds."""
    vocab_size = MAX_LISTED + 200
    logits = random_logits(3, vocab_size)
    rows = [Row(SamplingParams(top_k=9, top_p=0.8, min_p=0.01, seed=seed), logits) for seed in range(50)]
    searched = [*rows, Row(SamplingParams(top_k=MAX_LISTED + 1), logits)]
    assert drawn(rows) == drawn(searched)[: len(rows)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(temperature: float) -> None:
    """A seeded request gets the same token alone, in any place of any batch, and again."""
    params = SamplingParams(temperature=temperature, seed=7, top_p=0.95)
    seeded = [Row(params, random_logits(i), output=[0] * i) for i in range(5)]
    others = [Row(SamplingParams(top_k=3 + i), random_logits(50 + i)) for i in range(5)]
    alone = [drawn([row])[0] for row in seeded]
    mixed = [row for pair in zip(others, seeded, strict=True) for row in pair]
    assert drawn(mixed)[1::2] == alone
    assert drawn(mixed[::-1])[::2] == alone[::-1]


def test_draws_differ_by_seed_and_position() -> None:
    """Positions of a request, and requests without a seed, draw independently of each other."""
    flat = torch.zeros(VOCAB_SIZE)
    by_position = drawn([Row(SamplingParams(seed=1), flat, output=[0] * i) for i in range(200)])
    by_seed = drawn([Row(SamplingParams(seed=seed), flat) for seed in range(200)])
    unseeded = drawn([Row(SamplingParams(), flat)] * 200)
    for tokens in (by_position, by_seed, unseeded):
        assert len(set(tokens)) > VOCAB_SIZE * 0.8


@pytest.mark.slow
def test_the_kernels_compute_what_the_twin_computes() -> None:
    """The kernels compute torch's bits and draws, also in bf16, with masks, greedy rows and several tiles."""
    vocab_size = 2 * triton_sampling.BLOCK + 77
    logits = torch.stack([random_logits(seed, vocab_size) for seed in range(4)]).bfloat16()
    logits[1, : vocab_size - 3] = float("-inf")
    temperature = torch.tensor([0.7, 1.0, 0.0, 1.5])
    keys = torch.tensor([[3, -9], [0, 0], [2**31 - 1, -(2**31)], [11, 12]], dtype=torch.int32)
    top_k = torch.tensor([700, vocab_size, 5, vocab_size], dtype=torch.int32)
    top_p, min_p = torch.tensor([0.9, 0.8, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.003])
    twin, kernels = TorchSamplingOps(), TritonSamplingOps()
    floors = twin.floors(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(kernels.floors(logits, temperature, top_k, top_p, min_p), floors)
    expected, scores = twin.draw(logits, temperature, floors, keys)
    drawn, scored = kernels.draw(logits, temperature, floors, keys)
    assert torch.equal(drawn, expected)
    assert torch.allclose(scored, scores)
    assert expected[2] == logits[2].float().argmax()


def test_random_numbers_are_fair() -> None:
    """Each bit is set half the time over tokens and over keys; the exponential has mean and variance 1."""
    keys = torch.randint(-(2**31), 2**31, (64, 2), generator=torch.Generator().manual_seed(0)).int()
    bits = random_bits(keys, torch.arange(4096))
    share = (bits[..., None] >> torch.arange(32) & 1).double()
    assert (share.mean(dim=1) - 0.5).abs().max() < 6 * 0.5 / 4096**0.5
    assert (share.mean(dim=0) - 0.5).abs().max() < 6 * 0.5 / 64**0.5
    drawn = exponential(bits).double()
    assert abs(drawn.mean().item() - 1) < 0.01
    assert abs(drawn.var().item() - 1) < 0.03


@pytest.mark.slow
def test_kernels_fit_on_a_gpu() -> None:
    """Compiled for sm_90, neither kernel spills."""
    common = {"logits": "*bf16", "temperatures": "*fp32", "floors": "*fp32", "keys": "*i32"}
    draw = common | {"scores": "*fp32", "tokens": "*i64", "stride": "i32:16", "vocab_size": "i32:16"}
    floors = {
        "logits": "*bf16",
        "temperatures": "*fp32",
        "top_ks": "*i32",
        "top_ps": "*fp32",
        "min_ps": "*fp32",
    } | {
        "found": "*fp32",
        "stride": "i32:16",
        "vocab_size": "i32:16",
    }
    block = {"BLOCK": triton_sampling.BLOCK}
    builds = [
        KernelBuild(triton_sampling.draw_kernel, draw, block, num_warps=triton_sampling.DRAW_WARPS),
        KernelBuild(triton_sampling.floors_kernel, floors, block, num_warps=triton_sampling.FLOORS_WARPS),
    ]
    for resources in compile_all_for_sm90(builds):
        assert resources.spill_bytes == 0
        assert resources.shared_bytes <= MAX_SHARED_BYTES
