"""The features of a job for a regressor: its turns so far as numbers. Pure functions, so that a trace, a
recording and a running core give the same rows.

Work is counted in tokens, not in seconds: the number of tokens does not depend on what else is served.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

PREFILL_TOKENS = 40.0
"""Computing this many tokens of a prompt is about as much work as generating one."""
RECENT = 3
"""Number of the last turns of a job over which means are taken."""
MAX_TURNS = 200
"""Maximum number of remembered turns of a job; later ones count as work, but are not learned from."""
PLAIN_FEATURES = (
    "turns before this one",
    "work before this one",
    "tokens of the prompt",
    "tokens of the first prompt",
    "new tokens of the prompt",
    "generated tokens of the last turns, mean",
    "new tokens of the last prompts, mean",
    "seconds in tools",
    "number of different tools",
    "share of the commonest tool",
)
"""Names of the first features of a row; the number of calls of each tool of a vocabulary follows."""


class TurnFacts(msgspec.Struct, array_like=True, frozen=True):
    """A turn that has ended."""

    num_prompt_tokens: int
    num_new_tokens: int
    """Tokens of the prompt that no earlier turn of the job had computed."""
    num_output_tokens: int
    gap_s: float = 0.0
    """Seconds in tools before the turn."""
    tools: tuple[str, ...] = ()
    """The functions that it called, without their arguments."""

    @property
    def work(self) -> float:
        return work_of(self.num_new_tokens, self.num_output_tokens)


class PastJob(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A job that has ended, for the trainer."""

    group: str
    """Jobs of one group resemble each other: a model is never scored on jobs of a group that it learned
    from."""
    turns: tuple[TurnFacts, ...]
    later_work: float = 0.0
    """Work of the turns after these, in a job with more turns than are remembered."""


def work_of(num_new_tokens: int, num_output_tokens: int) -> float:
    """The work of a turn, in generated tokens."""
    return num_new_tokens / PREFILL_TOKENS + num_output_tokens


class JobHistory:
    """The turns of one job so far."""

    __slots__ = ("_first_tokens", "_num_calls", "_num_tool_calls", "_tool_s", "later_work", "turns", "work")

    def __init__(self) -> None:
        self.turns: list[TurnFacts] = []
        self.work = 0.0
        """Work of the turns that have ended."""
        self.later_work = 0.0
        """The part of ``work`` from turns beyond the remembered ones."""
        self._first_tokens = 0
        self._num_calls: dict[str, int] = {}
        self._num_tool_calls = 0
        self._tool_s = 0.0

    def add(self, turn: TurnFacts) -> None:
        """Adds a turn that has ended."""
        if not self.turns:
            self._first_tokens = turn.num_prompt_tokens
        self.work += turn.work
        self._tool_s += turn.gap_s
        if len(self.turns) < MAX_TURNS:
            self.turns.append(turn)
        else:
            self.later_work += turn.work
        self._count(turn.tools)

    def called(self, tools: Sequence[str]) -> None:
        """Records the functions that the last turn called, if they become known only later."""
        if self.turns and not self.later_work:
            self.turns[-1] = msgspec.structs.replace(self.turns[-1], tools=tuple(tools))
        self._count(tools)

    def _count(self, tools: Sequence[str]) -> None:
        for tool in tools:
            self._num_calls[tool] = self._num_calls.get(tool, 0) + 1
            self._num_tool_calls += 1

    def row(
        self, num_prompt_tokens: int, num_new_tokens: int, gap_s: float, vocabulary: Sequence[str]
    ) -> list[float]:
        """The features of a turn that begins: [len(PLAIN_FEATURES) + len(vocabulary)]."""
        recent = self.turns[-RECENT:]
        calls = self._num_calls
        num_recent = len(recent) or 1
        num_output = num_new = 0
        for turn in recent:
            num_output += turn.num_output_tokens
            num_new += turn.num_new_tokens
        return [
            float(len(self.turns)),
            self.work,
            float(num_prompt_tokens),
            float(self._first_tokens or num_prompt_tokens),
            float(num_new_tokens),
            num_output / num_recent,
            num_new / num_recent,
            self._tool_s + gap_s,
            float(len(calls)),
            max(calls.values()) / self._num_tool_calls if calls else 0.0,
            *(float(calls.get(tool, 0)) for tool in vocabulary),
        ]


def rows_of(job: PastJob, vocabulary: Sequence[str]) -> list[list[float]]:
    """The row of each turn of a job at its beginning."""
    history = JobHistory()
    rows = []
    for turn in job.turns:
        rows.append(history.row(turn.num_prompt_tokens, turn.num_new_tokens, turn.gap_s, vocabulary))
        history.add(turn)
    return rows


def remaining_work(job: PastJob) -> list[float]:
    """The work that the job still had at the beginning of each turn, that turn included."""
    remaining = []
    so_far = job.later_work
    for turn in reversed(job.turns):
        so_far += turn.work
        remaining.append(so_far)
    return remaining[::-1]
