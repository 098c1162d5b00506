"""A job as an agent ran it: turns, separated by tool calls or a person. One schema for all workloads.

A turn is described by counts (``input_tokens``, ``prefix_tokens``, ``output_tokens``), which a simulator
needs, and by text if the source recorded it, which a live replay can send unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GapKind(StrEnum):
    """What happens between a turn and the next one of its job."""

    TOOL = "tool"
    USER = "user"
    UNKNOWN = "unknown"
    END = "end"
    """Nothing: it was the last turn."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One tool call of a turn; several calls of one turn ran in parallel."""

    tool: str
    command: str | None = None
    """The program, for a shell tool."""
    seconds: float | None = None
    """Its duration; None if it was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request and what followed it."""

    input_tokens: int
    """Tokens of the whole prompt."""
    prefix_tokens: int
    """Tokens at its start that it shares with the job's previous turn (its prompt, then its output); 0 on the
    first turn."""
    output_tokens: int
    gap_kind: GapKind = GapKind.END
    gap_s: float | None = None
    """Seconds until the next turn may be sent; None if nothing ran or it is unknown."""
    gap_measured: bool = False
    """False: ``gap_s`` is an assumption of the workload's makers, not a measurement."""
    calls: tuple[ToolRun, ...] = ()
    spawns: tuple[str, ...] = ()
    """Ids of jobs (sub-agents) that this turn's calls start; the gap lasts until they are done, and at least
    ``gap_s``, which does not count them."""
    block_runs: tuple[tuple[int, int], ...] = ()
    """Ids of the prompt's full blocks of ``Job.block_size`` tokens, as runs ``(first, count)``; empty if the
    source has none. Equal ids within one ``Job.block_scope`` mean equal tokens from the very start."""
    told_last: bool = False
    """Whether its client said that no turn of the job would follow."""
    tells_calls: bool = True
    """Whether the engine receives the calls of its reply, or that there are none."""
    input_text: str | None = None
    """Text that this turn adds to the conversation: the task on the first turn, then a tool's result."""
    output_text: str | None = None

    @property
    def sampled_tokens(self) -> int:
        """Tokens that an engine generates for ``output_tokens``: a turn has at least one token."""
        return max(1, self.output_tokens)

    @property
    def tool(self) -> str | None:
        """The first call's tool."""
        return self.calls[0].tool if self.calls else None

    @property
    def command(self) -> str | None:
        """The first call's program."""
        return self.calls[0].command if self.calls else None

    @property
    def new_input_tokens(self) -> int:
        return self.input_tokens - self.prefix_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All turns of one agent run."""

    job_id: str
    source: str
    """Source of the job: the name of a recording, or ``synthetic``."""
    turns: tuple[Turn, ...]
    system_text: str = ""
    arrival_s: float | None = None
    """Seconds from the start of the trace; None if arrivals were not recorded."""
    tokens_measured: bool = True
    """False: token counts are estimates."""
    group: str | None = None
    """Jobs of one group resemble each other: never split them between a training and a test set."""
    tenant: str | None = None
    is_known: bool = True
    """False: a request without a job; the engine gets no job id."""
    finished_s: float | None = None
    """Time after its last turn at which its client said that it is done; None: it did not."""
    priority: int = 0
    """Priority of its requests; smaller goes first, under policies that use priorities."""
    parent_job: str | None = None
    """For a sub-agent: the job whose turn starts it (``Turn.spawns``)."""
    block_size: int = 0
    """Tokens in a block of ``block_runs``; 0 without."""
    block_scope: str | None = None
    """Scope of the ids in ``block_runs``: a name that jobs share, or None for this job alone."""
    shared_prefix_tokens: int = 0
    """Tokens at the start of every prompt (system prompt and tools) that all jobs with the same
    ``shared_prefix`` share."""
    shared_prefix: str | None = None

    @property
    def max_context_tokens(self) -> int:
        """Tokens of prompt and output of its longest turn."""
        return max(turn.input_tokens + turn.output_tokens for turn in self.turns)

    @property
    def has_text(self) -> bool:
        """Whether every turn can be sent unchanged."""
        return all(turn.input_text is not None and turn.output_text is not None for turn in self.turns)
