"""Whatever operators call, and whichever core dies: answers are those of the weights that are loaded."""

from __future__ import annotations

import pytest

from tests.reliability.operators import play

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.mark.parametrize("setting", ["shared", "pair"])
def test_answers_are_those_of_the_loaded_weights(setting: str) -> None:
    """``python -m tests.reliability.operators`` plays more rounds."""
    counts = play(setting, 12, seed=5)
    assert counts["answered"] == 12 * 2 * 4
