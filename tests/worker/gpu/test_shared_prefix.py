"""Cascade attention: a prefix that decodes share is attended to in one pass, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.gpu import triton_paged
from engine.worker.gpu.kv_splits import Splits, SplitScratch
from engine.worker.gpu.step_batch import PREFIX_UNIT, SharedPrefix, StepBatch
from engine.worker.gpu.tiling import Tiling
from engine.worker.gpu.triton_attention import Pages, Scoring, attend_prefix, attend_uniform, write_kv
from engine.worker.gpu.triton_paged import TritonPagedAttention
from tests.worker.attention_reference import HEAD_DIM, LAYER, AttentionCase, make_case, reference_output
from tests.worker.gpu.test_triton_attention import FP8, device_step, in_8_bits

FEW_ROWS, MANY_ROWS = Tiling(16, 32, 4, 3), Tiling(64, 64, 4, 3)


def with_shared_prefix(case: AttentionCase, num_tokens: int, members: list[int]) -> AttentionCase:
    """The case whose members begin with the first one's tokens. Only the first one's block table leads to
    them: those of the others lead to NaN."""
    leader, *others = members
    for seq in others:
        for mine, its in zip(case.sequences[seq], case.sequences[leader], strict=True):
            mine[:num_tokens] = its[:num_tokens]
    pool = torch.cat((case.pool, torch.full_like(case.pool[:1], torch.nan)))
    tables = case.batch.block_tables.copy()
    tables[others, : num_tokens // pool.shape[3]] = len(case.pool)
    return replace(case, pool=pool, batch=replace(case.batch, block_tables=tables))


def with_prefix(step: StepBatch, num_tokens: int, members: list[int]) -> StepBatch:
    lens = torch.zeros(step.num_uniform, dtype=torch.int32)
    lens[members] = num_tokens
    place = torch.tensor([int(step.rows[members[0]]), num_tokens], dtype=torch.int32)
    return replace(step, prefix=SharedPrefix(place, lens))


def attend(
    case: AttentionCase,
    num_tokens: int,
    members: list[int],
    *,
    num_splits: int = 4,
    num_empty: int = 0,
    tiling: Tiling = MANY_ROWS,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """The merged result of both passes, in fp64."""
    step = with_prefix(device_step(case, len(case.sequences), num_empty), num_tokens, members)
    pages = Pages(case.pool[:, LAYER, 0], case.pool[:, LAYER, 1])
    write_kv(pages, case.key, case.value, step.slots, kv_scale)
    query = torch.cat((case.query, case.query.new_ones(num_empty * step.uniform_len, *case.query.shape[1:])))
    output = torch.full_like(query, float("nan"))
    others = max(num_splits, 8 - num_splits)
    splits = Splits(num_splits, 32, SplitScratch.allocate(query.shape[2], query.device), others)
    of_prefix = Splits(others, 32, splits.scratch, num_splits, first=num_splits)
    splits.scratch.log_sums.fill_(float("nan"))
    scoring = Scoring(query.shape[2] ** -0.5, None, soft_cap, sinks, kv_scale)
    attend_prefix(query, pages, step, scoring, tiling, of_prefix)
    attend_uniform(output, query, pages, step, scoring, FEW_ROWS, splits)
    return output.double()


@pytest.mark.slow
@settings(max_examples=12)
@given(
    uniform_len=st.sampled_from((1, 1, 3)),
    group=st.integers(1, 5),
    page=st.sampled_from((5, 16, 64)),
    units=st.integers(1, 2),
    rests=st.lists(st.integers(0, 70), min_size=2, max_size=4),
    others=st.lists(st.integers(0, 200), max_size=2),
    num_empty=st.integers(0, 2),
    num_splits=st.sampled_from((1, 2, 4)),
    tiling=st.sampled_from((FEW_ROWS, MANY_ROWS)),
)
def test_a_prefix_is_read_where_the_first_has_it(
    uniform_len: int,
    group: int,
    page: int,
    units: int,
    rests: list[int],
    others: list[int],
    num_empty: int,
    num_splits: int,
    tiling: Tiling,
) -> None:
    """Members attend to the prefix in the pass, and to their own tokens after it; others only to their own;
    places without a sequence to nothing."""
    num_tokens = units * PREFIX_UNIT
    contexts = [num_tokens + page + rest for rest in rests] + others
    lengths = tuple((uniform_len, context + uniform_len) for context in contexts)
    case = make_case(
        num_kv_heads=2,
        num_heads=2 * group,
        head_dim=16,
        dtype=torch.float32,
        lengths=lengths,
        block_size=page,
    )
    members = list(range(len(rests)))
    case = with_shared_prefix(case, num_tokens, members)
    got = attend(case, num_tokens, members, num_splits=num_splits, num_empty=num_empty, tiling=tiling)
    num_real = uniform_len * len(lengths)
    assert (got[:num_real] - reference_output(case, None)).abs().max() < 1e-5
    assert not got[num_real:].any()


LENGTHS = ((1, 150), (1, 190), (1, 90), (1, 300))
SHARERS = [0, 1, 3]


def shared_case() -> AttentionCase:
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=LENGTHS)
    return with_shared_prefix(case, PREFIX_UNIT, SHARERS)


def test_a_soft_cap_and_sinks() -> None:
    """Scores are capped in both passes, and a sink takes its share once."""
    case = shared_case()
    case = replace(case, query=case.query * 50)
    sinks = torch.linspace(-2.0, 4.0, case.query.shape[1])
    got = attend(case, PREFIX_UNIT, SHARERS, soft_cap=5.0, sinks=sinks)
    assert (got - reference_output(case, None, soft_cap=5.0, sinks=sinks)).abs().max() < 1e-5


def test_kv_of_8_bits() -> None:
    """Both passes apply its scale."""
    case, scale = shared_case(), 0.25
    case = replace(
        case,
        key=in_8_bits(case.key, scale),
        value=in_8_bits(case.value, scale),
        sequences=[(in_8_bits(key, scale), in_8_bits(value, scale)) for key, value in case.sequences],
    )
    narrow = replace(case, pool=(case.pool / scale).to(FP8))
    got = attend(narrow, PREFIX_UNIT, SHARERS, kv_scale=scale)
    assert (got - reference_output(case, None)).abs().max() < 1e-5


@pytest.mark.slow
def test_layers_with_a_window_or_chunks_read_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in steps with a prefix, such layers read their own keys; full attention uses the pass."""
    case = make_case(num_kv_heads=2, dtype=torch.float32, lengths=LENGTHS)
    passes: list[int] = []

    def counted(*args: object) -> None:
        passes.append(len(args))
        attend_prefix(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_paged, "attend_prefix", counted)
    step = with_prefix(device_step(case, len(LENGTHS), 0), PREFIX_UNIT, [0])
    attention = TritonPagedAttention(case.pool)
    attention.begin_device_step(step)
    for kinds in ({"window": 40}, {"window": None, "chunk": 64}, {"window": None}):
        got = attention.attend(LAYER, case.query, case.key, case.value, scale=HEAD_DIM**-0.5, **kinds)
        wanted = reference_output(case, kinds["window"], chunk=kinds.get("chunk"))
        assert (got.double() - wanted).abs().max() < 1e-5
    assert len(passes) == 1
