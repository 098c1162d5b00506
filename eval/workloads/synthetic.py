"""Agent jobs made from a seed, for machines without recorded ones: equal arguments give equal jobs.

Shaped after published SWE-bench agents: about 10 turns, tools that mostly take tens of milliseconds with a
long log-normal tail (mean 0.93 s, sd 3.55 s; arXiv 2511.02230, table 2). The words mean nothing.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from eval.workloads.job import GapKind, Job, ToolRun
from eval.workloads.transcript import Exchange, Transcript

SOURCE = "synthetic"
TOOL_MEAN_S = 0.925
TOOL_SD_S = 3.55

_PROGRAMS = (
    # Program, share of all calls, seconds relative to the mean of all.
    ("ls", 0.12, 0.1),
    ("cat", 0.22, 0.1),
    ("grep", 0.20, 0.3),
    ("sed", 0.14, 0.1),
    ("python", 0.18, 2.0),
    ("pytest", 0.14, 3.6),
)

_SYSTEM = (
    "You are an agent that solves programming tasks by running one shell command per turn. "
    "Explain your reasoning first, then write the command. The rules of this repository follow.\n\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """Sizes of the synthetic jobs. A word is 3 to 4 tokens for a tokenizer with a small vocabulary."""

    num_jobs: int = 8
    seed: int = 0
    min_turns: int = 6
    max_turns: int = 14
    system_words: int = 80
    task_words: int = 120
    result_words: int = 60
    """Mean; a result has between a quarter of this and twice this."""
    thought_words: int = 4
    max_tool_s: float = 20.0
    hermes: bool = False
    """Write calls as ``<tool_call>`` JSON instead of a fenced ``bash`` block."""


def make_jobs(config: SyntheticConfig) -> list[Job]:
    """Makes the jobs of a seed. All share one system prompt, as with a real agent."""
    vocabulary = _vocabulary(random.Random(f"vocabulary {config.seed}"))
    system_text = _SYSTEM + _prose(random.Random(f"system {config.seed}"), vocabulary, config.system_words)
    return [
        _make_job(config, index, system_text, vocabulary, random.Random(f"job {config.seed} {index}"))
        for index in range(config.num_jobs)
    ]


def _make_job(
    config: SyntheticConfig, index: int, system_text: str, vocabulary: list[str], rng: random.Random
) -> Job:
    num_turns = rng.randint(config.min_turns, config.max_turns)
    transcript = Transcript(system_text)
    input_text = f"Task {index}. {_prose(rng, vocabulary, config.task_words)}"
    for number in range(1, num_turns):
        program, gap_s = _tool_run(rng, config.max_tool_s)
        command = f"{program} {rng.choice(vocabulary)}/{rng.choice(vocabulary)}.py"
        thought = _prose(rng, vocabulary, config.thought_words)
        transcript.add(
            Exchange(
                input_text=input_text,
                output_text=f"THOUGHT: step {number}. {thought}\n\n{_call(command, config.hermes)}",
                gap_kind=GapKind.TOOL,
                gap_s=gap_s,
                calls=(ToolRun("bash", program, gap_s),),
            )
        )
        input_text = _tool_result(rng, vocabulary, config.result_words)
    answer = f"Done. {_prose(rng, vocabulary, config.thought_words)}"
    transcript.add(Exchange(input_text=input_text, output_text=answer))
    return transcript.job(f"synthetic-{config.seed}-{index}", SOURCE)


def _tool_run(rng: random.Random, max_s: float) -> tuple[str, float]:
    """Draws a program and its duration: log-normal around the program's mean, cut at ``max_s``."""
    names, shares, paces = zip(*_PROGRAMS, strict=True)
    program = rng.choices(names, shares)[0]
    pace = paces[names.index(program)] / sum(s * p for s, p in zip(shares, paces, strict=True))
    # Part of the overall spread is between the programs; within one the same sd/mean ratio is kept.
    variance = math.log(1 + (TOOL_SD_S / TOOL_MEAN_S) ** 2)
    median_s = TOOL_MEAN_S * pace * math.exp(-variance / 2)
    return program, round(min(max_s, rng.lognormvariate(math.log(median_s), math.sqrt(variance))), 3)


def _call(command: str, hermes: bool) -> str:
    if hermes:
        return '<tool_call>\n{"name": "bash", "arguments": {"command": "' + command + '"}}\n</tool_call>'
    return f"```bash\n{command}\n```"


def _tool_result(rng: random.Random, vocabulary: list[str], mean_words: int) -> str:
    words = rng.randint(max(1, mean_words // 4), 2 * mean_words - mean_words // 4)
    return f"<returncode>0</returncode>\n<output>\n{_prose(rng, vocabulary, words)}\n</output>"


def _vocabulary(rng: random.Random, size: int = 400) -> list[str]:
    """Returns pronounceable words of two to three syllables."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    return sorted({"".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(size)})


def _prose(rng: random.Random, vocabulary: list[str], num_words: int) -> str:
    """Returns words in lines of ten, like a tool's output."""
    words = rng.choices(vocabulary, k=num_words)
    return "\n".join(" ".join(words[i : i + 10]) for i in range(0, num_words, 10))
