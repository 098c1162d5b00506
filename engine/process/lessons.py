"""What a policy learns in a process of its own: lessons out, models back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Lesson = Callable[[], bytes]
"""Encodes what is to be learned; called where nobody waits, as that takes milliseconds."""


class ModelLearned(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """A model that was fitted to a lesson of the policy. An input like any other: a trace has it."""

    model: str
    """The model, as the policy's trainer writes it."""
