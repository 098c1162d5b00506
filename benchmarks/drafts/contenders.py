"""The drafters compared: the suffix drafter with and without its memories, V1's n-gram look-up, and none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config.speculative import SpeculativeConfig
from engine.core.drafts.drafter import Drafter, make_drafter
from engine.core.drafts.proposal import NOTHING, Proposal
from engine.core.request import Request

SUFFIX = "suffix, job and kind"
NONE = "no drafts"


class _NoDrafter:
    """Proposes nothing."""

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        return NOTHING

    def ended(self, request: Request) -> None:
        """Keeps nothing of the request."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter, and what it knows of jobs."""

    name: str
    config: SpeculativeConfig | None
    knows_jobs: bool = True
    knows_kinds: bool = True
    """False: each job is a separate tenant, or each turn if ``knows_jobs`` is false too."""

    def make(self, job_of: Callable[[Request], str | None]) -> Drafter:
        """Makes a new drafter, which has seen nothing."""
        if self.config is None:
            return _NoDrafter()
        return make_drafter(self.config, job_of if self.knows_jobs else lambda request: None)


def contenders(max_drafts: int) -> list[Contender]:
    """Returns all drafters that are compared, each with at most ``max_drafts`` drafts in a step."""
    suffix = SpeculativeConfig(num_speculative_tokens=max_drafts)
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=max_drafts)
    short = SpeculativeConfig(
        method="ngram", num_speculative_tokens=max_drafts, prompt_lookup_min=2, prompt_lookup_max=5
    )
    return [
        Contender(SUFFIX, suffix),
        Contender("suffix, job alone", suffix, knows_kinds=False),
        Contender("suffix, no memory", suffix, knows_jobs=False, knows_kinds=False),
        Contender("n-gram of 5 (V1)", ngram),
        Contender("n-gram of 2 to 5", short),
        Contender(NONE, None),
    ]
