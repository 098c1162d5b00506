"""The training dialogues of the bundled model: slips and what follows them, and names of common pieces."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.agent_model.dialogues import GIVEN_UP, Dialogue, Message, draw_dialogues
from eval.agent_model import folder
from eval.agent_model.names import Names

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    return list(islice(draw_dialogues(7), 600))


def _tasks(dialogue: Dialogue) -> Iterator[list[tuple[Message, bool, list[str]]]]:
    """For each task its assistant messages, whether they are learned, and the results of their calls."""
    learned = iter(dialogue.learned)
    turns: list[tuple[Message, bool, list[str]]] = []
    for message in dialogue.messages:
        if message["role"] == "user":
            if turns:
                yield turns
            turns = []
        elif message["role"] == "assistant":
            turns.append((message, next(learned), []))
        elif message["role"] == "tool":
            turns[-1][2].append(message["content"])
    yield turns


def test_a_slip_names_a_file_that_is_not_there_and_is_followed_by_a_look_around(
    dialogues: list[Dialogue],
) -> None:
    """The slip is not learned. The listing of the named folder that follows is, and so is giving up after a
    second slip."""
    num_single = num_double = 0
    for turns in (turns for dialogue in dialogues for turns in _tasks(dialogue)):
        slips = [place for place, (_, learned, _) in enumerate(turns) if not learned]
        for place in slips:
            assert any("error: no such file" in result for result in turns[place][2])
        ends = turns[-1][0]["content"] == GIVEN_UP
        assert ends == (len(slips) == 2)
        for place in slips[: 1 if ends else None]:
            (call,) = turns[place + 1][0]["tool_calls"]
            assert call["function"]["name"] == "list_files"
        num_single += len(slips) == 1
        num_double += ends
    assert num_single > 20
    assert num_double > 5


def test_no_piece_of_a_name_tells_the_one_before_it() -> None:
    """With the shipped tokenizer, nearly every token of evaluation names follows at least three different
    tokens in training names; otherwise the model would always complete it that way."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder())
    training, held_out = (Names(random.Random(1), held_out) for held_out in (False, True))
    before: dict[str, set[str]] = defaultdict(set)
    for _ in range(30_000):
        for first, second in pairwise(["", *tokenizer.tokenize(training.word())]):
            before[second].add(first)
    words = [tokenizer.tokenize(held_out.word()) for _ in range(2_000)]
    told = [word for word in words if any(len(before[token]) < 3 for token in word[1:])]
    assert len(told) < 0.005 * len(words), told
