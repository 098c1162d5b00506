"""Learns what follows a turn, by how it ended: no further turn, or by how many tokens the next prompt is
longer. It does not know engine or policy.

Means back off from a kind of call to its parents; one thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from estimator.durations import HALF_LIFE, PRIOR_STRENGTH
from estimator.plain_math import halved
from estimator.tool_key import ToolKey

MAX_KEYS = 1024
LAST_AFTER_CALL = 0.02
LAST_AFTER_ANSWER = 0.5
"""Prior probability that a turn is the last, worth ``PRIOR_STRENGTH`` observations: after a tool call the
client has a result to send; an answer may be the end."""


@dataclass(slots=True)
class TurnTally:
    """Decayed sums over the turns that ended in the same way."""

    num_turns: float = 0.0
    num_last: float = 0.0
    num_followed: float = 0.0
    """Number of turns that were not the last and whose next prompt was seen."""
    growth_tokens: float = 0.0

    def fade(self, keep: float) -> None:
        self.num_turns *= keep
        self.num_last *= keep
        self.num_followed *= keep
        self.growth_tokens *= keep


class TurnOutcomes:
    """P(last turn) and expected growth of the prompt, by how the turn ended.

    Of parallel calls the first represents all. Each mean is shrunk towards its parent's by the number of
    observations: Bühlmann's credibility (ASTIN Bulletin 4, 1967) with a fixed strength.
    """

    def __init__(self) -> None:
        self.prior_strength = PRIOR_STRENGTH
        self.half_life = HALF_LIFE
        self.last_after_call = LAST_AFTER_CALL
        self.last_after_answer = LAST_AFTER_ANSWER
        self.tallies: OrderedDict[tuple[str, ...], TurnTally] = OrderedDict()
        """Tallies by ``call`` and the parts of the key, or ``answer``; the least recently seen
        first, a parent always after its children."""

    def share_weights_with(self, other: TurnOutcomes) -> None:
        """Copies this object's weights to the other one."""
        other.prior_strength = self.prior_strength
        other.half_life = self.half_life
        other.last_after_call = self.last_after_call
        other.last_after_answer = self.last_after_answer

    def observe_last(self, tools: Sequence[ToolKey]) -> None:
        """Learns that a turn that ended with these calls (none: an answer) was the last of its job."""
        for tally in self._tallies_of(tools):
            tally.num_last += 1

    def observe_next(self, tools: Sequence[ToolKey], growth_tokens: int) -> None:
        """Learns that such a turn was followed by a prompt that is this many tokens longer than its own
        prompt and answer; negative values count as 0, since that prompt was cut."""
        for tally in self._tallies_of(tools):
            tally.num_followed += 1
            tally.growth_tokens += max(0, growth_tokens)

    def last_turn_probability(self, tools: Sequence[ToolKey] | None) -> float:
        """P(no turn follows); ``tools`` is None if it is not known how the turn ended."""
        probability = self.last_after_call if tools is None or tools else self.last_after_answer
        # Calls and answers say nothing about each other, so the tally of all turns is left out.
        for tally in self._known(tools)[0 if tools is None else 1 :]:
            weight = tally.num_turns + self.prior_strength
            probability = (tally.num_last + self.prior_strength * probability) / weight
        return probability

    def prompt_growth(self, tools: Sequence[ToolKey] | None) -> float | None:
        """Expected tokens that the next prompt adds to this prompt and its answer; None if nothing is
        learned."""
        growth: float | None = None
        for tally in self._known(tools):
            if growth is None:
                growth = tally.growth_tokens / tally.num_followed if tally.num_followed else None
            else:
                weight = tally.num_followed + self.prior_strength
                growth = (tally.growth_tokens + self.prior_strength * growth) / weight
        return growth

    def _tallies_of(self, tools: Sequence[ToolKey]) -> list[TurnTally]:
        """Returns the tallies of the key and its parents, faded, with one turn added."""
        whole = _parts(tools)
        tallies = []
        for depth in range(len(whole), -1, -1):
            parts = whole[:depth]
            tally = self.tallies.setdefault(parts, TurnTally())
            tally.fade(halved(1 / self.half_life))
            tally.num_turns += 1
            tallies.append(tally)
            self.tallies.move_to_end(parts)
        while len(self.tallies) > MAX_KEYS:
            self.tallies.popitem(last=False)
        return tallies

    def _known(self, tools: Sequence[ToolKey] | None) -> list[TurnTally]:
        """The existing tallies, from that of all turns down to that of the key."""
        parts = _parts(tools)
        found = (self.tallies.get(parts[:depth]) for depth in range(len(parts) + 1))
        return [tally for tally in found if tally is not None]


def _parts(tools: Sequence[ToolKey] | None) -> tuple[str, ...]:
    """The path under which a turn is counted: ``call/bash/pytest``, ``answer``; the root if it is not
    known."""
    if tools is None:
        return ()
    return ("call", *tools[0].parts) if tools else ("answer",)
