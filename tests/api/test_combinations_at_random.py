"""Random combinations of features and operator calls never change an answer."""

from __future__ import annotations

import pytest

from tests.reliability.combinations import play_draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.mark.parametrize("seed", [24, 49])
def test_answers_are_those_of_the_request_alone(seed: int) -> None:
    """Each answer equals the answer of its request alone. ``make combinations`` draws more cases."""
    counts = play_draw(seed, 3)
    assert counts["answered"] == 4 * 6
