"""Routers by name."""

from __future__ import annotations

from continuum.routing.job_router import JobRouter
from engine.routing import LeastLoadedRouter, RouterFactory

ROUTERS: dict[str, RouterFactory] = {"jobs": JobRouter, "least-loaded": LeastLoadedRouter}
DEFAULT_ROUTER = "jobs"


def router_factory(name: str) -> RouterFactory:
    """The factory of the router of this name, one of ``ROUTERS``."""
    return ROUTERS[name]
