"""A task of an agent, and how its answer is scored: a folder, a question about it, a way to solve it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SPARE_TURNS = 3
"""Turns beyond the needed ones, for the model's own errors."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; the arguments in the order in which they are written."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of an agent, and how its answer is scored."""

    task_id: str
    kind: str
    prompt: str
    files: Mapping[str, str]
    rounds: tuple[tuple[Call, ...], ...]
    """The calls that solve it, turn by turn; those of one turn do not depend on each other."""
    answer: str
    expected: str
    """Text with which the answer must end."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Files that must exist in the end, with this content."""

    @property
    def max_turns(self) -> int:
        return len(self.rounds) + 1 + SPARE_TURNS

    def check(self, answer: str, root: Path) -> bool:
        """Whether this answer and the folder's present content solve the task."""
        return _ends_with(answer, self.expected) and all(
            _content(root / path) == content for path, content in self.written.items()
        )


def _ends_with(answer: str, expected: str) -> bool:
    text = answer.strip().rstrip(".!`'\"")
    return re.search(rf"(?<![\w/.-]){re.escape(expected)}$", text) is not None


def _content(path: Path) -> str | None:
    try:
        return path.read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        return None
