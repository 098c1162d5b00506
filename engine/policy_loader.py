"""Policies by name: the engine's own, and any class or function of a module on the path."""

from __future__ import annotations

from engine.core.policy import PolicyFactory, fcfs, priority
from engine.errors import ConfigError
from engine.process.outside_module import import_outside

BUILT_IN: dict[str, PolicyFactory] = {"fcfs": fcfs, "priority": priority}


def load_policy(name: str) -> PolicyFactory:
    """``fcfs``, ``priority``, or ``module:attribute``: a policy class that takes a PolicyContext, or a
    function that makes a policy from one. The module may be in the working directory. ConfigError if there is
    no such policy."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute.isidentifier()):
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"Unknown policy {name!r}; choose from {known}, MODULE:ATTRIBUTE.")
    try:
        module = import_outside(module_name)
    except ImportError as error:
        raise ConfigError(f"Policy {name!r} cannot be imported: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f"Policy {name!r}: module {module_name} has no class or function {attribute}.")
    made: PolicyFactory = factory
    return made
