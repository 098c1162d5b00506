"""Whatever features run together, and whatever operators call: each answer is that of the request alone."""

from __future__ import annotations

import pytest

from tests.reliability.combinations import play_draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.mark.parametrize("seed", [2, 7])
def test_answers_are_those_of_the_request_alone(seed: int) -> None:
    """``make combinations`` draws more."""
    counts = play_draw(seed, 3)
    assert counts["answered"] == 4 * 6
