"""Makes the engines of a simulation, exact or coarse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.core.policy import SchedulingPolicy
from engine.records.messages import EngineCoreOutput
from eval.baselines.knowledge import NamedPolicy
from eval.errors import UsageError
from eval.sim.event_heap import EventHeap
from eval.sim.replicas.coarse import CoarseReplica
from eval.sim.replicas.exact import ExactReplica
from eval.sim.replicas.replica import ReplicaConfig, SimReplica

if TYPE_CHECKING:
    from eval.sim.sim_config import SimConfig

EXACT = "exact"
COARSE = "coarse"
REPLICA_MODELS = (EXACT, COARSE)


def check_replica_model(config: SimConfig, policy: NamedPolicy) -> None:
    """Raises UsageError if the requested engines cannot be simulated coarsely."""
    if config.replica_model not in REPLICA_MODELS:
        choices = ", ".join(REPLICA_MODELS)
        raise UsageError(f"--replica-model must be one of {choices}, got {config.replica_model!r}.")
    if config.replica_model == EXACT:
        if config.num_prefill_replicas:
            raise UsageError("--prefill-replicas needs --replica-model coarse.")
        return
    if policy.name != "fcfs":
        raise UsageError(f"--replica-model coarse supports only the policy fcfs, not {policy.name}.")
    if config.host_kv_tokens:
        raise UsageError("--replica-model coarse has no host memory: leave out --host-kv-tokens.")
    if config.drafts is not None:
        raise UsageError("--replica-model coarse has no drafts: leave out --drafts.")
    if config.has_windows:
        raise UsageError(
            "--replica-model coarse supports only models in which every layer keeps the KV of all tokens."
        )


def make_replicas(
    number: int,
    model: str,
    config: ReplicaConfig,
    make_policy: Callable[[], SchedulingPolicy],
    events: EventHeap,
    on_outputs: Callable[[Iterable[EngineCoreOutput]], None],
) -> list[SimReplica]:
    """Calls ``on_outputs`` at a step's end with the requests that ended in it. Begins a trace if there is a
    tracer."""
    if model == COARSE:
        return [CoarseReplica(config, events, on_outputs) for _ in range(number)]
    replicas = [ExactReplica(config, make_policy(), events, on_outputs) for _ in range(number)]
    if config.tracer is not None:
        config.tracer.emit(replicas[0].begin_trace())
    return list(replicas)
