"""Random combinations of features and operator calls never change an answer."""

from __future__ import annotations

import pytest

from tests.reliability.combinations import play_draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.mark.parametrize(("seed", "is_pair"), [(24, False), (49, True)])
def test_answers_are_those_of_the_request_alone(seed: int, is_pair: bool) -> None:
    """Each answer equals the answer of its request alone: of a model that reads pictures, and of a server
    for which another one computes prompts. ``make combinations`` draws more cases."""
    counts = play_draw(seed, 3)
    assert counts["answered"] == 4 * 6
    assert (counts["handed over"] > 0) == is_pair
