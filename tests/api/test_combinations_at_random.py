"""Random combinations of features and operator calls never change an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from random import Random

import pytest

from tests.reliability.combinations import Setting, draw, play_draw
from tests.reliability.questions import MEDIA_FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def test_answers_of_a_model_that_reads_pictures() -> None:
    """Each answer equals the answer of its request alone. ``make combinations`` draws more cases."""
    counts = _played(lambda setting: setting.family in MEDIA_FAMILIES and not setting.computes_for)
    assert counts["handed over"] == 0


def test_answers_where_another_server_computes_prompts() -> None:
    counts = _played(lambda setting: setting.computes_for)
    assert counts["handed over"] > 0


def _played(is_wanted: Callable[[Setting], object]) -> Counter[str]:
    """Plays the first draw that is wanted and that this machine can serve."""
    wanted = (seed for seed in count(1) if is_wanted(draw(Random(seed), Path("unused"))))
    counts = next(counts for seed in islice(wanted, 5) if not (counts := play_draw(seed, 3))["rejected"])
    assert counts["answered"] == 4 * 6
    return counts
