"""Tokens with drafts have the model's distribution, whatever is drafted; and all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.config.engine_config import SchedulerConfig
from engine.core.outputs import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.backend import AttentionBackend
from engine.worker.gpu.device_batch import DeviceBatch
from engine.worker.gpu.device_rank_sampler import select_device_sampler
from engine.worker.gpu.device_runner import DeviceModelRunner
from engine.worker.gpu.forward import Forward
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.sampling_ops import SamplingOps
from engine.worker.gpu.streams import HostStreams
from engine.worker.gpu.torch_sampling import TorchSamplingOps
from engine.worker.gpu.triton_sampling import TritonSamplingOps
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from tests.worker.gpu.step_attention import TorchStepAttention
from tests.worker.gpu.test_device_rank_sampler import ClientHint

VOCAB_SIZE, NUM_DRAFTS, BLOCK_SIZE = 6, 3, 8
START = 0
DEVICE = torch.device("cpu")
LOGITS = torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(4))
"""[previous token, next token]"""
Probabilities = npt.NDArray[np.float64]


class MarkovModel:
    """A CausalModel whose next token depends on the last one alone. It has no layers."""

    num_layers = num_kv_heads = head_dim = num_kv_vectors = 1
    windows: tuple[int | None, ...] = ()
    chunks: tuple[int | None, ...] = ()

    def __init__(self, rank: int) -> None:
        self._logits = LOGITS if rank == 0 else LOGITS[:, :0]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        return self._logits[input_ids[sample_rows]]


class MarkovEngine:
    """Many requests that begin with START, all at the same place, with steps planned by hand."""

    def __init__(
        self,
        num_requests: int,
        params: Callable[[int], SamplingParams],
        *,
        ops: SamplingOps | None = None,
        captured: bool = False,
        group: TensorParallelGroup = ALONE,
        seed: int = 0,
    ) -> None:
        limits = SchedulerConfig(
            max_num_seqs=num_requests, max_num_batched_tokens=num_requests * (NUM_DRAFTS + 1)
        )
        streams = HostStreams()
        sizes = GraphSizes((num_requests,) if captured else (), NUM_DRAFTS + 1)
        sampler = select_device_sampler(seed, VOCAB_SIZE, ops or TorchSamplingOps(), streams, group)
        self.batch = DeviceBatch(limits, 32, BLOCK_SIZE, sizes, sampler, DEVICE, streams)
        attention = TorchStepAttention(torch.zeros((2, 1, 2, BLOCK_SIZE, 1, 1)))
        forward = Forward(MarkovModel(group.rank), attention, self.batch, sizes, streams)
        forward.capture()
        self._runner = DeviceModelRunner(forward, self.batch, sampler, streams)
        self._names = [f"r{i}" for i in range(num_requests)]
        self._tokens: dict[str, list[int]] = {name: [START] for name in self._names}
        new = [NewRequestData(name, [START], params(i), [1], 0) for i, name in enumerate(self._names)]
        self._run(new, CachedRequestData(), {})

    def step(self, drafts: dict[str, list[int]] | None = None) -> ModelRunnerOutput:
        """Runs the next step, with drafts of some requests."""
        computed = [len(self._tokens[name]) - 1 for name in self._names]
        cached = CachedRequestData(
            req_ids=self._names, new_block_ids=[[] for _ in self._names], num_computed_tokens=computed
        )
        return self._run([], cached, drafts or {})

    def outputs(self) -> list[list[int]]:
        return [tokens[1:] for tokens in self._tokens.values()]

    def _run(
        self, new: list[NewRequestData], cached: CachedRequestData, drafts: dict[str, list[int]]
    ) -> ModelRunnerOutput:
        scheduled = {name: 1 + len(drafts.get(name, ())) for name in self._names}
        total = sum(scheduled.values())
        plan = SchedulerOutput(
            new, cached, scheduled, total, set(), set(), scheduled_spec_decode_tokens=drafts
        )
        output = self._runner.execute_model(plan)
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self._tokens[name] += tokens
        return output


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> Probabilities:
    """The softmax of a row, cut to its ``top_k`` best, and of those to the best that reach ``top_p``."""
    p = logits.double().softmax(dim=-1).numpy()
    best = np.argsort(-p)[:top_k]
    shares = np.cumsum(p[best]) / p[best].sum()
    best = best[: int(np.searchsorted(shares, top_p)) + 1]
    left = np.zeros_like(p)
    left[best] = p[best] / p[best].sum()
    return left


LIKELY: list[int] = LOGITS.argmax(dim=-1).tolist()


def drafts_behind(outputs: list[list[int]], random: np.random.Generator) -> dict[str, list[int]]:
    """Likely drafts, some with a random token; one request in eight has none, most have the maximum."""
    drafts = {}
    for i, tokens in enumerate(outputs):
        draft = [LIKELY[tokens[-1]]]
        while len(draft) < NUM_DRAFTS:
            is_likely = random.random() < 0.9
            draft.append(LIKELY[draft[-1]] if is_likely else int(random.integers(VOCAB_SIZE)))
        if length := min(i % 8, NUM_DRAFTS):
            drafts[f"r{i}"] = draft[:length]
    return drafts


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("top_k", "top_p"), [(VOCAB_SIZE, 1.0), (3, 1.0), (VOCAB_SIZE, 0.8), (4, 0.9)])
def test_the_distribution_is_that_of_the_model(top_k: int, top_p: float, captured: bool) -> None:
    """A chi-squared test at 5 sigma of the tokens at each place of a step with drafts, given the previous
    token; drafts are likely or not, of all lengths."""
    counts = np.zeros((NUM_DRAFTS + 1, VOCAB_SIZE, VOCAB_SIZE))
    params = SamplingParams(top_k=top_k, top_p=top_p, max_tokens=30, ignore_eos=True)
    random = np.random.default_rng(7)
    for seed in range(16):
        engine = MarkovEngine(512, lambda _: params, captured=captured, seed=seed)
        for _ in range(4):
            before = [len(tokens) for tokens in engine.outputs()]
            engine.step(drafts_behind(engine.outputs(), random))
            for start, tokens in zip(before, engine.outputs(), strict=True):
                for place in range(start, len(tokens)):
                    counts[place - start, tokens[place - 1], tokens[place]] += 1
    transitions = np.stack([kept(row, top_k, top_p) for row in LOGITS])
    for place in range(NUM_DRAFTS + 1):
        deviation = chi_squared_deviation(counts[place], transitions)
        assert deviation < 5, f"place {place}: {deviation:.1f} sigma"


def test_the_kernel_draws_what_torch_draws() -> None:
    """The kernel draws the same tokens as torch at every place of steps with drafts."""
    params = SamplingParams(top_k=4, top_p=0.9, max_tokens=30, ignore_eos=True)
    told = []
    for ops in (TorchSamplingOps(), TritonSamplingOps()):
        engine, random = MarkovEngine(16, lambda _: params, ops=ops), np.random.default_rng(7)
        for _ in range(2):
            engine.step(drafts_behind(engine.outputs(), random))
        told.append(engine.outputs())
    assert told[0] == told[1]


def chi_squared_deviation(counts: Probabilities, transitions: Probabilities) -> float:
    """Deviation of the statistic from its mean, in standard deviations; rows of at least 100 counts.

    counts, transitions [previous token, next token]; asserts that no impossible token was drawn.
    """
    assert not counts[transitions == 0].any()
    statistic, freedom = 0.0, 0
    for row, probabilities in zip(counts, transitions, strict=True):
        expected = row.sum() * probabilities
        enough = expected >= 5
        if row.sum() < 100 or enough.sum() < 2:
            continue
        found = np.append(row[enough], row[~enough].sum())
        wanted = np.append(expected[enough], expected[~enough].sum())
        found, wanted = found[wanted > 0], wanted[wanted > 0]
        statistic += float(((found - wanted) ** 2 / wanted).sum())
        freedom += len(wanted) - 1
    assert freedom >= 6, "too few counts"
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def test_all_ranks_take_the_same_drafts() -> None:
    """The first of two ranks samples, without seeds; the other, without logits and with another generator,
    accepts the same drafts, and has the same tokens and lengths in its rows."""
    board: dict[str, torch.Tensor] = {}
    met, told = Barrier(2), {}
    params = SamplingParams(top_k=2, max_tokens=30, ignore_eos=True)

    def run(rank: int) -> None:
        engine = MarkovEngine(16, lambda _: params, group=ClientHint(rank, board, met), seed=rank)
        random, lengths = np.random.default_rng(7), []
        for _ in range(4):
            output = engine.step(drafts_behind(engine.outputs(), random))
            lengths.append([len(tokens) for tokens in output.sampled_token_ids])
        told[rank] = engine.outputs(), lengths
        held = [engine.batch.token_ids[i, 1:][: len(t)].tolist() for i, t in enumerate(engine.outputs())]
        assert sorted(held) == sorted(engine.outputs())

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[0] == told[1]
    lengths = [length for step in told[0][1] for length in step]
    assert set(lengths) == {1, 2, 3, 4}
