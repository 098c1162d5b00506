"""Makes the texts of a chat for a job that was recorded as counts, with approximately those counts.

The counts are approximate because the tokens that a chat template adds are not known exactly, and a history
can only be cut between messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eval.load.job_tokens import JobTokens, Tokens
from eval.workloads.job import Job, Turn


@dataclass(frozen=True, slots=True)
class TurnTexts:
    """The texts of one turn, and how many earlier turns are still in the history."""

    input_text: str
    output_text: str
    num_kept: int


class SyntheticChat:
    """Writes synthetic jobs with words that are about one token each."""

    def __init__(self, words: list[str], tokens_per_turn: int, seed: int) -> None:
        self._words = words
        self._alphabet: Tokens = np.arange(len(words), dtype=np.int64)
        self._tokens_per_turn = tokens_per_turn
        """Tokens that the server's template adds to a turn."""
        self._seed = seed

    def write(self, job: Job, call_texts: list[str], call_tokens: list[int]) -> tuple[str, list[TurnTexts]]:
        """Returns the system prompt and the turns; each output ends with its call's text."""
        tokens = JobTokens(job, self._alphabet, self._seed)
        shared = job.shared_prefix_tokens if job.shared_prefix is not None else 0
        system_tokens = min(shared, job.turns[0].input_tokens - 1)
        history: list[Turn] = []
        said: list[TurnTexts] = []
        for index, turn in enumerate(job.turns):
            # A turn stays if the prefix has all of its prompt; a template may drop parts of its output.
            num_kept = sum(turn.prefix_tokens >= earlier.input_tokens for earlier in history)
            del history[num_kept:]
            start = history[-1].input_tokens + history[-1].output_tokens if history else system_tokens
            num_input = max(1, turn.input_tokens - start - self._tokens_per_turn)
            num_output = max(1, turn.output_tokens - 1 - call_tokens[index])
            output_text = self._text(tokens.output(index, num_output)) + call_texts[index]
            said.append(
                TurnTexts(self._text(tokens.content(index, start, start + num_input)), output_text, num_kept)
            )
            history.append(turn)
        return self._text(tokens.content(0, 0, system_tokens)), said

    def _text(self, tokens: Tokens) -> str:
        return "".join(f" {self._words[token]}" for token in tokens)
