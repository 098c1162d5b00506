"""A learned model of remaining work, with what it was judged by when it was made."""

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
    """The mean of what it learned from: the logarithm of the remaining work of a usual turn's job."""
    num_jobs: Annotated[int, msgspec.Meta(ge=0)]
    num_turns: Annotated[int, msgspec.Meta(ge=0)]
    right: Share
    """Share of pairs of jobs that it did not learn from and ordered rightly by their remaining work."""
    right_by_age: Share
    """The same of the order by turns: the job that has had more of them has less to do."""
    version: int = MODEL_VERSION


def check_model(model: WorkModel) -> None:
    """ModelError if it cannot be walked."""
    if model.version != MODEL_VERSION:
        raise ModelError(
            f"its model of remaining work has version {model.version}, this program reads {MODEL_VERSION}"
        )
    fault = model.trees.fault(len(PLAIN_FEATURES) + len(model.tools))
    if fault is not None:
        raise ModelError(f"its model of remaining work is damaged: {fault}")
