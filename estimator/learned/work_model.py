"""A learned model of remaining work, with its scores from training."""

from __future__ import annotations

from typing import Annotated

import msgspec

from estimator.learned.job_history import PLAIN_FEATURES
from estimator.learned.trees import MAX_TOOLS, ModelError, Trees

MODEL_VERSION = 1
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class WorkModel(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts the natural logarithm of a job's remaining work, in generated tokens."""

    trees: Trees
    tools: Annotated[list[str], msgspec.Meta(max_length=MAX_TOOLS)]
    """Tools whose calls are counted, after the plain features."""
    usual: Annotated[float, msgspec.Meta(ge=-50, le=50)]
    """The mean of its targets: the logarithm of the remaining work of a job at a usual turn."""
    num_jobs: Annotated[int, msgspec.Meta(ge=0)]
    num_turns: Annotated[int, msgspec.Meta(ge=0)]
    right: Share
    """Share of pairs of held-out jobs that it ordered correctly by their remaining work."""
    right_by_age: Share
    """The same share for the order by age, where the job with more turns has less remaining work."""
    version: int = MODEL_VERSION


def check_model(model: WorkModel) -> None:
    """Raises ModelError if the model cannot be evaluated."""
    if model.version != MODEL_VERSION:
        raise ModelError(
            f"its model of remaining work has version {model.version}, this program reads {MODEL_VERSION}"
        )
    fault = model.trees.fault(len(PLAIN_FEATURES) + len(model.tools))
    if fault is not None:
        raise ModelError(f"its model of remaining work is damaged: {fault}")
