"""Random operator calls and core deaths: answers always match the loaded weights."""

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
    """Answers match the loaded weights. ``python -m tests.reliability.operators`` plays more rounds."""
    counts = play(setting, 12, seed=5)
    assert counts["answered"] == 12 * 2 * 4
