"""Recreates the policy of a trace from its header."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext, PolicyFactory, SchedulingPolicy, fcfs, priority
from engine.errors import ConfigError
from estimator.state import EstimatorStateError
from eval.baselines.fixed_ttl import FixedTtlPolicy
from eval.baselines.fork import ForkPolicy
from eval.baselines.gate import GatePolicy
from eval.baselines.gittins import GittinsPolicy
from eval.baselines.hrrn import HrrnPolicy
from eval.baselines.idleness import IdlenessPolicy
from eval.baselines.pause import PausePolicy
from eval.baselines.plas import PlasPolicy
from eval.baselines.program_fcfs import ProgramFcfsPolicy
from eval.baselines.tlru import TlruPolicy
from eval.baselines.without import WITHOUT
from eval.baselines.wspt import WsptPolicy
from eval.trace.replay.errors import NotReplayableError
from tracing.events import TraceHeader

Options = dict[str, float | int | str | bool | None]

TOLD_THE_FUTURE = ("paper", "infercept", "known-work", "oracle")
"""Policies that query knowledge only a simulation has."""
_OURS: tuple[type[ContinuumPolicy], ...] = (ContinuumPolicy, *WITHOUT)
_CONTINUUM = {kind.name: kind for kind in _OURS}
_PLAIN: dict[str, Callable[..., SchedulingPolicy]] = {
    "fcfs": fcfs,
    "priority": priority,
    "program-fcfs": ProgramFcfsPolicy,
    "fixed-ttl": FixedTtlPolicy,
    "fork": ForkPolicy,
    "plas": PlasPolicy,
    "hrrn": HrrnPolicy,
    "wspt": WsptPolicy,
    "gittins": GittinsPolicy,
    "tlru": TlruPolicy,
    "pause": PausePolicy,
    "idleness": IdlenessPolicy,
    "gate": GatePolicy,
}


def recorded_policy(header: TraceHeader) -> PolicyFactory:
    """Raises NotReplayableError, a sentence, if the policy cannot be recreated."""
    name = header.policy
    if name in TOLD_THE_FUTURE:
        raise NotReplayableError(
            f"the policy {name} used what only its simulation knew: it can be analyzed, but not replayed"
        )
    if name in _CONTINUUM:
        config = _continuum_config(header.policy_options)
        return _RecordedContinuum(_CONTINUUM[name], config, header.estimator_state)
    if name not in _PLAIN:
        raise NotReplayableError(f"the header names a policy that this program does not have: {name!r}")
    options = {option: _value(value) for option, value in header.policy_options.items()}
    return partial(_PLAIN[name], **options)


def _continuum_config(recorded: Options) -> ContinuumConfig:
    expected = {field.name for field in fields(ContinuumConfig)} - {"estimator_state"}
    differing = ", ".join(sorted(expected ^ recorded.keys()))
    if differing:
        raise NotReplayableError(
            f"the policy continuum of this program has other options than the header's: {differing}"
        )
    try:
        return ContinuumConfig(**{name: _value(value) for name, value in recorded.items()})  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        raise NotReplayableError(f"the header's options of the policy continuum: {error}") from error


def _value(value: float | int | str | bool | None) -> float | int | str | bool | None:
    """Decodes an infinity, which JSON lacks and the header has as text."""
    return math.inf if value == "inf" else value


@dataclass(frozen=True, slots=True)
class _RecordedContinuum:
    """Starts with what its estimator had learned at the recorded start, and has no file for new lessons."""

    kind: type[ContinuumPolicy]
    config: ContinuumConfig
    state: str | None

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        policy = self.kind(context, self.config)
        if self.state is not None:
            try:
                policy.tools.recall(self.state)
            except EstimatorStateError as error:
                raise NotReplayableError(
                    f"the estimator state in the header cannot be used: {error}"
                ) from error
        return policy
