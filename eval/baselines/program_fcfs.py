"""program-fcfs: the program that arrived first goes first, the youngest is preempted. No pins."""

from __future__ import annotations

from eval.baselines.program import ProgramPolicy


class ProgramFcfsPolicy(ProgramPolicy):
    """Orders by the program's first arrival (Continuum, arXiv 2511.02230, section 4.3, without its pins)."""

    name = "program-fcfs"
    wants_signals = False
