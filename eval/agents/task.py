"""What an agent is given to do, and how a program tells whether it did it. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Task(Protocol):
    """One job for an agent, in a folder of its own."""

    @property
    def task_id(self) -> str: ...

    @property
    def kind(self) -> str:
        """Tasks of one kind are counted together."""
        ...

    @property
    def prompt(self) -> str: ...

    @property
    def files(self) -> Mapping[str, str]:
        """What is in the folder at the start: relative path to content."""
        ...

    @property
    def max_turns(self) -> int:
        """Replies of the model, the answer among them."""
        ...

    def check(self, answer: str, root: Path) -> bool:
        """Whether this answer, and what is in the folder now, is what was asked for."""
        ...
