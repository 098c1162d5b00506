"""Synthetic tokens of a job have the lengths and shared prefixes that its counts state."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eval.load.job_tokens import JobTokens, Tokens
from eval.workloads.job import Job, Turn

ALPHABET: Tokens = np.arange(50, 90, dtype=np.int64)
NOTHING: Tokens = np.empty(0, dtype=np.int64)


@st.composite
def _jobs(draw: st.DrawFn) -> Job:
    """Prompts of any lengths, each keeping any part of the previous turn."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 6))):
        held = turns[-1].input_tokens + turns[-1].output_tokens if turns else 0
        prefix = draw(st.integers(0, held))
        new = draw(st.integers(1 if prefix == 0 else 0, 60))
        output = draw(st.integers(1, 30))
        turns.append(Turn(input_tokens=prefix + new, prefix_tokens=prefix, output_tokens=output))
    return Job(job_id="j", source="made", turns=tuple(turns))


def _replayed(job: Job, seed: int = 0) -> tuple[list[Tokens], list[Tokens]]:
    """Returns the prompts, and the prompts with their outputs."""
    tokens = JobTokens(job, ALPHABET, seed)
    prompts: list[Tokens] = []
    whole: list[Tokens] = []
    for index, turn in enumerate(job.turns):
        prompts.append(tokens.prompt(index, whole[-1] if whole else NOTHING))
        whole.append(np.concatenate((prompts[-1], tokens.output(index, turn.output_tokens))))
    return prompts, whole


def _num_shared(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    return int(np.argmin(np.append(a[:length] == b[:length], False)))


@given(_jobs(), st.integers(0, 2**32))
def test_a_prompt_has_its_length_and_exactly_its_prefix(job: Job, seed: int) -> None:
    """Exactly the stated prefix is shared with the previous turn, and all tokens are in the alphabet."""
    prompts, whole = _replayed(job, seed)
    for index, turn in enumerate(job.turns):
        assert len(prompts[index]) == turn.input_tokens
        assert np.isin(whole[index], ALPHABET).all()
        if index:
            assert _num_shared(prompts[index], whole[index - 1]) == turn.prefix_tokens


@given(_jobs(), st.integers(0, 2**32))
def test_a_seed_gives_the_same_tokens_always_and_another_seed_others(job: Job, seed: int) -> None:
    """Tokens depend on the job and the seed only."""
    first, second = _replayed(job, seed)[1], _replayed(job, seed)[1]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    long = Job(job_id="j", source="made", turns=(Turn(input_tokens=99, prefix_tokens=0, output_tokens=1),))
    assert not np.array_equal(_replayed(long, seed)[0][0], _replayed(long, seed + 1)[0][0])


@given(st.integers(1, 5), st.integers(0, 15), st.integers(1, 40))
def test_what_a_turn_leaves_open_is_what_the_next_turns_blocks_hold(
    num_blocks: int, tail: int, output: int
) -> None:
    """A partial last block and the answer become full blocks of the next turn; any job with these blocks,
    such as a sub-agent, has the same tokens."""
    held = 16 * num_blocks + tail + output
    after = (held + 20) // 16
    job = Job(
        job_id="parent",
        source="made",
        block_size=16,
        block_scope="family",
        turns=(
            Turn(
                input_tokens=16 * num_blocks + tail,
                prefix_tokens=0,
                output_tokens=output,
                block_runs=((1, num_blocks),),
            ),
            Turn(input_tokens=held + 20, prefix_tokens=held, output_tokens=1, block_runs=((1, after),)),
        ),
    )
    child = Job(
        job_id="child",
        source="made",
        block_size=16,
        block_scope="family",
        turns=(Turn(input_tokens=16 * after, prefix_tokens=0, output_tokens=1, block_runs=((1, after),)),),
    )
    assert _num_shared(_replayed(job)[0][1], _replayed(child)[0][0]) == 16 * after
