"""All policies by their command-line names: ``fcfs``, ``fixed-ttl:10``, ``continuum:x=1``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy, ContinuumPolicyFactory
from continuum.tuning import Tuning
from engine.core.policy import PolicyContext, PolicyFactory, SchedulingPolicy, fcfs, priority
from engine.errors import ConfigError
from engine.policy_loader import load_policy
from estimator.state import EstimatorStateError, load_learned, snapshot
from eval.baselines.fixed_ttl import FixedTtlPolicy
from eval.baselines.fork import ForkPolicy
from eval.baselines.gate import GatePolicy
from eval.baselines.gittins import GittinsPolicy
from eval.baselines.hrrn import HrrnPolicy
from eval.baselines.idleness import IdlenessPolicy
from eval.baselines.infercept import InferceptPolicy
from eval.baselines.knowledge import Knowledge, MakePolicy, NamedPolicy
from eval.baselines.known_work import KnownWorkPolicy
from eval.baselines.oracle import OraclePolicy
from eval.baselines.paper import PaperPolicy
from eval.baselines.pause import PausePolicy
from eval.baselines.plas import PlasPolicy
from eval.baselines.program_fcfs import ProgramFcfsPolicy
from eval.baselines.tlru import TlruPolicy
from eval.baselines.without import WITHOUT, LessenedFactory
from eval.baselines.wspt import WsptPolicy
from eval.errors import PolicyError


@dataclass(frozen=True, slots=True)
class _Kind:
    """A row of the catalog. ``plain`` makes the policy that a server runs, ``informed`` the simulated one
    (None: the same). Both take the text after the colon."""

    syntax: str
    summary: str
    plain: Callable[[str], PolicyFactory] | None = None
    informed: Callable[[str], MakePolicy] | None = None
    ablation: bool = False
    """Whether it is a policy with a part removed, for experiments; a server does not list it."""

    @property
    def name(self) -> str:
        return self.syntax.partition("[")[0]

    @property
    def serves(self) -> bool:
        """Whether a server offers it: it needs no knowledge of the future and is no ablation."""
        return self.plain is not None and not self.ablation


@dataclass(frozen=True, slots=True)
class _Uninformed:
    """A policy that needs no knowledge beyond what an engine sees."""

    factory: PolicyFactory

    def __call__(self, context: PolicyContext, knowledge: Knowledge) -> SchedulingPolicy:
        return self.factory(context)


@dataclass(frozen=True, slots=True)
class _Learned:
    """A policy that begins every run with the same learned state of a server, which no run changes."""

    make: MakePolicy
    state: str

    def __call__(self, context: PolicyContext, knowledge: Knowledge) -> SchedulingPolicy:
        policy = self.make(context, knowledge)
        assert isinstance(policy, ContinuumPolicy)
        policy.tools.recall(self.state)
        return policy


def parse_policy(text: str) -> NamedPolicy:
    """Returns the named policy for a simulation: it writes no file, and reads its state file now. Raises
    PolicyError, which lists the choices, for an unknown policy."""
    kind, parameter = _find(text)
    if kind.informed is not None:
        return NamedPolicy(text, kind.informed(parameter))
    assert kind.plain is not None
    return NamedPolicy(text, _Uninformed(kind.plain(parameter)))


def parse_policies(text: str) -> list[NamedPolicy]:
    """Parses policies separated by commas; ``name=value`` after a comma continues the policy before it."""
    names: list[str] = []
    for part in text.split(","):
        is_option = "=" in part and ":" not in part.partition("=")[0]
        if is_option and names:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    for name in filter(None, names):
        if names.count(name) > 1:
            raise PolicyError(f"Policy {name} is named twice.")
    return [parse_policy(name) for name in names]


def serving_policy(text: str) -> PolicyFactory:
    """Returns the named policy for a server, whose core process makes it. PolicyError, which lists a server's
    choices, for an unknown policy and for one that needs knowledge only a simulation has."""
    kind, parameter = _find(text, serving=True)
    if kind.plain is None:
        raise PolicyError(f"Policy {kind.name} needs knowledge that only a simulation has.")
    return kind.plain(parameter)


def policy_names(*, serving: bool = False) -> list[tuple[str, str]]:
    """Returns syntax and a one-line summary of each policy; ``serving``: only those that a server offers."""
    return [(kind.syntax, kind.summary) for kind in _KINDS if not serving or kind.serves]


def ablation_names() -> list[str]:
    """Returns the ablations, which a server does not offer."""
    return [kind.name for kind in _KINDS if kind.ablation]


def _find(text: str, *, serving: bool = False) -> tuple[_Kind, str]:
    name, colon, parameter = text.partition(":")
    kind = next((kind for kind in _KINDS if kind.name == name), None)
    if kind is None and parameter.isidentifier():
        factory = _of_module(text)
        return _Kind(text, "a policy of a module", lambda _: factory), ""
    if kind is None:
        known = ", ".join(syntax for syntax, _ in policy_names(serving=serving))
        raise PolicyError(f"Unknown policy {name!r}; choose from {known}, MODULE:ATTRIBUTE.")
    if colon and (not parameter or "[" not in kind.syntax):
        raise PolicyError(f"Policy {text!r} must have the form {kind.syntax}.")
    return kind, parameter


def _of_module(text: str) -> PolicyFactory:
    try:
        return load_policy(text)
    except ConfigError as error:
        raise PolicyError(str(error)) from error


def _number(kind: str, unit: str, parameter: str, default: float, most: float) -> float:
    """Parses a number from 0 to ``most``."""
    if not parameter:
        return default
    try:
        number = float(parameter)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most or math.isinf(number):
        limit = f"from 0 to {most:g}" if most < math.inf else "of at least 0"
        raise PolicyError(f"{kind}:{unit} must be a number {limit}, got {parameter!r}.")
    return number


_SWITCH = {"true": True, "false": False}
_LIMITS = frozenset({"max_first_wait_s"})
"""Options that are numbers, or none."""


def _continuum_config(parameter: str) -> ContinuumConfig:
    """Parses ``name=value,...`` for ContinuumConfig's fields; a value has the type of the field's default."""
    defaults = {
        field.name: field.default
        for field in sorted(fields(ContinuumConfig), key=_is_tuning)
        if field.default is not MISSING
    }
    options: dict[str, str | float | int | None] = {}
    for part in parameter.split(",") if parameter else ():
        name, _, value = part.partition("=")
        if name in options:
            raise PolicyError(f"continuum:{name} is given twice.")
        if name not in defaults:
            raise PolicyError(f"continuum has no option {name!r}; choose from {', '.join(defaults)}.")
        default = defaults[name]
        if isinstance(default, bool):
            if value not in _SWITCH:
                raise PolicyError(f"continuum:{name} must be true or false, got {value!r}.")
            options[name] = _SWITCH[value]
            continue
        kind: Callable[[str], str | float | int | None] = (
            type(default) if isinstance(default, float | int) else str
        )
        if name in _LIMITS:
            kind = _limit
        try:
            options[name] = kind(value)
        except ValueError:
            raise PolicyError(f"continuum:{name} must be a number, got {value!r}.") from None
    try:
        return ContinuumConfig(**options)  # type: ignore[arg-type]  # checked above, by name
    except ConfigError as error:
        raise PolicyError(f"continuum:{error}") from error


def _limit(value: str) -> float | None:
    return None if value == "none" else float(value)


def _simulated(parameter: str, make: Callable[[ContinuumConfig], MakePolicy]) -> MakePolicy:
    """Returns the policy with these options, without a state file that its runs would share."""
    config = _continuum_config(parameter)
    if config.estimator_state is None:
        return make(config)
    return _Learned(make(replace(config, estimator_state=None)), _state_in(Path(config.estimator_state)))


def _state_in(path: Path) -> str:
    """Returns the learned state in a file; raises PolicyError if it cannot be used."""
    if not path.exists():  # a server would create the file; here it can only be a mistake
        raise PolicyError(f"continuum:estimator_state: no such file: {path}.")
    try:
        return snapshot(load_learned(path)).decode()
    except EstimatorStateError as error:
        raise PolicyError(str(error)) from error


def _is_tuning(field: Field[Any]) -> bool:
    """Whether the field is a tuning option, for which a server has no flag."""
    return field.name in {one.name for one in fields(Tuning)}


def _lessened(policy: type[ContinuumPolicy]) -> _Kind:
    told = " ".join((policy.__doc__ or "").split()).rstrip(".")
    return _Kind(
        policy.name,
        f"as continuum, but {told[:1].lower()}{told[1:]}",
        lambda _: LessenedFactory(policy, ContinuumConfig()),
        ablation=True,
    )


_KINDS: Sequence[_Kind] = (
    _Kind("fcfs", "first come, first served, with an LRU prefix cache (vLLM V1)", lambda _: fcfs),
    _Kind(
        "priority",
        "by the request's priority, then by arrival (vLLM V1)",
        lambda _: priority,
    ),
    _Kind("program-fcfs", "by arrival of the job's first turn; no pins", lambda _: ProgramFcfsPolicy),
    _Kind(
        "fixed-ttl[:SECONDS]",
        "every turn pinned for this long (2); order: preempted, cached, then age of the job",
        lambda text: partial(FixedTtlPolicy, ttl_s=_number("fixed-ttl", "SECONDS", text, 2.0, math.inf)),
    ),
    _Kind(
        "fork",
        "the Continuum preview code: pinned 2 s if the tool's mean time is at most 2 s or unknown",
        lambda _: ForkPolicy,
    ),
    _Kind("plas", "Autellix PLAS: least attained service of the job first; no pins", lambda _: PlasPolicy),
    _Kind("hrrn", "SGLang: wait over prompt tokens to compute, most first; no pins", lambda _: HrrnPolicy),
    _Kind("wspt", "Dynamo: weight over prompt tokens to compute, most first; no pins", lambda _: WsptPolicy),
    _Kind(
        "gittins",
        "multistage Gittins index of the job, by its turns and those of ended jobs; no pins",
        lambda _: GittinsPolicy,
    ),
    _Kind(
        "tlru[:TOKENS]",
        "SGLang: evicts first the last TOKENS (8192) of each conversation; fcfs",
        lambda text: partial(TlruPolicy, tokens=int(_number("tlru", "TOKENS", text, 8192, math.inf))),
    ),
    _Kind(
        "gate[:FRACTION]",
        "admits no new job while contexts of open jobs exceed this fraction of the KV pool (0.9)",
        lambda text: partial(GatePolicy, share=_number("gate", "FRACTION", text, 0.9, 1.0)),
    ),
    _Kind(
        "pause[:FRACTION]",
        "ThunderAgent: pauses programs above this fraction of the KV pool (0.95) until they fit in 0.8",
        lambda text: partial(PausePolicy, share=_number("pause", "FRACTION", text, 0.95, 1.0)),
    ),
    _Kind(
        "idleness",
        "MORI: takes programs that are mostly in tools off the device first; they wait to return",
        lambda _: IdlenessPolicy,
    ),
    _Kind(
        "continuum[:OPTION=VALUE,...]",
        "this project's policy; options of continuum serve with _ for -; estimator_state is only read",
        lambda text: ContinuumPolicyFactory(_continuum_config(text)),
        lambda text: _simulated(text, lambda config: _Uninformed(ContinuumPolicyFactory(config))),
    ),
    _Kind(
        "paper",
        "the Continuum paper (v6): argmax of P(τ,f)(T̄η + PrefillReload) - τ",
        informed=lambda _: PaperPolicy,
    ),
    _Kind(
        "infercept",
        "InferCept: preserve, discard or swap, by least memory waste",
        informed=lambda _: InferceptPolicy,
    ),
    _Kind(
        "known-work[:OPTION=VALUE,...]",
        "as continuum, knowing the remaining work of each job",
        informed=lambda text: _simulated(text, lambda config: partial(KnownWorkPolicy, config=config)),
    ),
    _Kind("oracle", "as continuum, knowing when each turn returns", informed=lambda _: OraclePolicy),
    *map(_lessened, WITHOUT),
)
