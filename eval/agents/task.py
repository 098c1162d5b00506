"""A task for an agent, and how a program checks the result. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Task(Protocol):
    """One task for an agent, in a separate folder."""

    @property
    def task_id(self) -> str: ...

    @property
    def kind(self) -> str:
        """The kind of task, by which results are grouped."""
        ...

    @property
    def prompt(self) -> str: ...

    @property
    def files(self) -> Mapping[str, str]:
        """The files of the folder at the start: relative path to content."""
        ...

    @property
    def max_turns(self) -> int:
        """Maximum number of responses, including the answer."""
        ...

    def check(self, answer: str, root: Path) -> bool:
        """Whether this answer and the folder's content now solve the task."""
        ...
