"""Lessons of simulated servers: learned at once, where a server has a process of its own take seconds."""

from __future__ import annotations

import msgspec

from engine.process.lessons import ModelLearned
from eval.sim.replicas.replica import SimReplica


def teach(replica: SimReplica) -> None:
    """Have a replica's policy learn what is due. Loads scikit-learn at the first lesson."""
    lesson = replica.take_lesson()
    if lesson is None:
        return
    from estimator.learned.job_history import PastJob
    from estimator.learned.trainer import fit
    from estimator.learned.work_model import encode_model

    model = fit(msgspec.msgpack.decode(lesson(), type=list[PastJob]))
    if model is not None:
        replica.signal(ModelLearned(encode_model(model).decode()))
