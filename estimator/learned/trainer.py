"""Fits the models of jobs' remaining work and of calls' durations.

``main`` runs in a separate process at low priority, so that the core never loads scikit-learn. It reads a
lesson (msgpack: past jobs, or past calls) from standard input and writes a model (JSON) to standard output.
"""

from __future__ import annotations

import os
import sys

import msgspec

from estimator.learned.call_history import PastCall
from estimator.learned.duration_trainer import fit_durations
from estimator.learned.job_history import PastJob
from estimator.learned.models import Model, encode_model
from estimator.learned.work_trainer import fit_work

NICENESS = 15


def learned_from(lesson: bytes) -> Model | None:
    """Fits the model of a lesson; None if there is too little to learn from."""
    past = msgspec.msgpack.decode(lesson, type=list[PastJob | PastCall])
    calls = [each for each in past if isinstance(each, PastCall)]
    return fit_durations(calls) if calls else fit_work([each for each in past if isinstance(each, PastJob)])


def main() -> None:
    """Trains on the lesson from standard input; writes nothing if there is too little to learn from."""
    os.nice(NICENESS)
    model = learned_from(sys.stdin.buffer.read())
    if model is not None:
        sys.stdout.buffer.write(encode_model(model))
