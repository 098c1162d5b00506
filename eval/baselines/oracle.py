"""oracle: the order, admission and breaking of ``continuum``; what to hold is decided knowing the future."""

from __future__ import annotations

import math

from continuum.config import ContinuumConfig
from continuum.jobs import Frontier
from continuum.policy import ContinuumPolicy
from continuum.ttl import TtlDecision, TtlInputs
from engine.policy import PolicyContext
from eval.baselines.knowledge import Knowledge

SLACK_S = 1.0
"""A pin outlives the return that it waits for by so much: sub-agents and the way to the engine take time."""


class OraclePolicy(ContinuumPolicy):
    """Holds a frontier until it returns, or lets go at once.

    Under pressure all that waits is delayed by what is taken of the scarcer resource. Holding m of N blocks
    for D takes m·D/N seconds of the whole pool; computing them again takes PrefillReload seconds of the whole
    device. So a frontier is held if m·D/N is at most PrefillReload.
    """

    grace_s = 0.0

    def __init__(self, context: PolicyContext, knowledge: Knowledge) -> None:
        super().__init__(context, ContinuumConfig(max_ttl_s=math.inf))
        self._knowledge = knowledge
        self._num_blocks = context.num_blocks

    def choose_ttl(self, frontier: Frontier, inputs: TtlInputs) -> TtlDecision:
        gap_s = self._knowledge.gap_s(frontier.request_id)
        if gap_s is None:
            return TtlDecision(0.0, "the last turn")
        num_tokens = inputs.num_blocks * self._block_size
        again_s = self._knowledge.reload_s(num_tokens)
        if again_s is None:
            again_s = self._knowledge.prefill_s(num_tokens)
        if inputs.num_blocks * gap_s > again_s * self._num_blocks:
            return TtlDecision(0.0, "holding takes more of the pool than computing of the device")
        return TtlDecision(gap_s + SLACK_S, "until it returns")
