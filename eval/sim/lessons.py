"""Lessons of simulated servers: learned at once, where a server's training process takes seconds."""

from __future__ import annotations

from engine.records.lessons import ModelLearned
from eval.sim.replicas.replica import SimReplica


def teach(replica: SimReplica) -> None:
    """Trains a replica's policy if a lesson is due. Loads scikit-learn at the first lesson."""
    lesson = replica.take_lesson()
    if lesson is None:
        return
    from estimator.learned.models import encode_model
    from estimator.learned.trainer import learned_from

    model = learned_from(lesson())
    if model is not None:
        replica.signal(ModelLearned(encode_model(model).decode()))
