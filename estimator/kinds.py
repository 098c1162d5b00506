"""Kinds of jobs, of which a bounded number is remembered."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple, TypeVar


class Kind(NamedTuple):
    """Jobs of a tenant whose prompts begin alike."""

    tenant: str | None
    beginning: bytes | None
    """The hash of the beginning; None for all jobs of the tenant."""


Known = TypeVar("Known")


def forget_one(kinds: OrderedDict[Kind, Known]) -> None:
    """Forgets a kind of the tenant that has most: of these the least recently seen, which comes first. So no
    tenant's kinds displace another's."""
    num_of = Counter(kind.tenant for kind in kinds)
    most = max(num_of.values())
    del kinds[next(kind for kind in kinds if num_of[kind.tenant] == most)]
