"""What a separate process learns for a policy: lessons go to it, models are returned."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Lesson = Callable[[], bytes]
"""Encodes what is to be learned. It takes milliseconds, so it is called where no request waits."""


class ModelLearned(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """A model that was fitted to a lesson of the policy. Like any other input, it is recorded in the
    trace."""

    model: str
    """The model, in the format of the policy's trainer."""
