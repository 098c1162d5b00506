"""The eight-turn agent of an independent study: fixed prompts that grow a hundredfold, and short tools.

Source: hungchun0201/agentic-ai-survey, ai-infra-basics/lmcache/bottleneck-analysis, section 1.3 (April 2026).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.sampling import NO_LIMITS, JobLimits, Sample, limited, nothing_left

EIGHT_TURNS = "eight-turns"
"""Name of the workload."""
PROMPT_TOKENS = (92, 1840, 3449, 6025, 7454, 10299, 12333, 13193)
OUTPUT_TOKENS = 20
TOOL_S = 0.5
NUM_JOBS = 100


@dataclass(frozen=True, slots=True)
class EightTurnWorkload:
    """As many of these agents as requested; they differ in nothing but their tokens."""

    name: str = EIGHT_TURNS
    notes: list[str] = field(default_factory=lambda: ["tokens and tools: PUBLISHED, alike in all jobs"])

    def sample(self, num_jobs: int | None, seed: int | None, limits: JobLimits = NO_LIMITS) -> Sample:
        turns = tuple(_turn(number) for number in range(len(PROMPT_TOKENS)))
        numbers = range(num_jobs or NUM_JOBS)
        jobs = [Job(job_id=f"job-{number}", source=EIGHT_TURNS, turns=turns) for number in numbers]
        within = limited(jobs, limits)
        if not within.jobs:
            raise nothing_left(f"no job of {EIGHT_TURNS}", within.notes)
        return Sample(within.jobs, [*self.notes, *within.notes])


def _turn(number: int) -> Turn:
    last = number == len(PROMPT_TOKENS) - 1
    return Turn(
        input_tokens=PROMPT_TOKENS[number],
        prefix_tokens=PROMPT_TOKENS[number - 1] + OUTPUT_TOKENS if number else 0,
        output_tokens=OUTPUT_TOKENS,
        gap_kind=GapKind.END if last else GapKind.TOOL,
        gap_s=None if last else TOOL_S,
        calls=() if last else (ToolRun("tool", seconds=TOOL_S),),
    )
