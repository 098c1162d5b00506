"""Equal hashes mean equal tokens from the start, in the same context."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv_cache.block_hash import BlockHasher
from engine.core.request import Request
from engine.records.messages import MediaSpan
from engine.records.sampling_params import SamplingParams

HASHER = BlockHasher(4)
TOKENS = st.lists(st.integers(0, 3), max_size=20)


def hashes(tokens: list[int], **context: Any) -> list[bytes]:
    return Request(
        "r", tokens, SamplingParams(max_tokens=1), 0.0, block_hasher=HASHER, **context
    ).block_hashes


@given(TOKENS, TOKENS)
def test_hashes_agree_exactly_as_far_as_full_blocks_do(a: list[int], b: list[int]) -> None:
    """Two sequences share as many hashes as they share leading full blocks."""
    shared = sum(a[: i + 4] == b[: i + 4] for i in range(0, min(len(a), len(b)) // 4 * 4, 4))
    assert sum(x == y for x, y in zip(hashes(a), hashes(b), strict=False)) == shared


@given(TOKENS)
def test_growing_gives_the_same_chain_as_starting_whole(tokens: list[int]) -> None:
    """Hashes added token by token equal those of the whole sequence."""
    grown = Request("r", tokens[:1], SamplingParams(max_tokens=1), 0.0, block_hasher=HASHER)
    for token in tokens[1:]:
        grown.append_output_token(token)
    assert grown.block_hashes == hashes(tokens)


@pytest.mark.parametrize(
    ("context", "first_changed_block"),
    [
        ({"cache_salt": "s"}, 0),
        ({"adapter": "a"}, 0),
        ({"media": [MediaSpan("picture", 5, 2)]}, 1),
        ({"media": [MediaSpan("picture", 7, 2)]}, 1),
    ],
)
def test_context_separates_prefixes(context: dict[str, Any], first_changed_block: int) -> None:
    """Salt, adapter and media change the hash of the first block they touch and of all after it."""
    plain, other = hashes([0] * 16), hashes([0] * 16, **context)
    assert [a == b for a, b in zip(plain, other, strict=True)] == [i < first_changed_block for i in range(4)]


def test_media_differ_by_content_and_place() -> None:
    """The same picture one token later, or another picture in its place, gives another prefix."""
    spans = [MediaSpan("p", 0, 4), MediaSpan("p", 1, 4), MediaSpan("q", 0, 4)]
    assert len({hashes([0] * 4, media=[span])[0] for span in spans}) == 3
