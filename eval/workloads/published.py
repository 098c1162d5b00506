"""Synthetic agent jobs matched to published moments: token counts and times only, no text.

Turns, tool times and tokens per program: arXiv 2511.02230 (v6), table 2, over 100 GPT-5 traces each. The
paper does not define a program's tokens; here they are its final context: prompt and answer of the last turn.
With this reading BFCL's figures cannot all be within 128k tokens: no variable between 0 and M with mean m has
a standard deviation above sqrt(m (M - m)), which is 60k there, not 68.7k. So some of these jobs are longer.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from eval.errors import WorkloadError
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.tool_times import ToolMix, ToolShape

MAX_SCALE = 1000.0
"""Largest scale of turns or tokens: beyond it, a typing error would only use up all memory."""
TOOL_TIMEOUT_S = 60.0
"""Longest synthetic tool time; the longest of the published traces is unknown."""


@dataclass(frozen=True, slots=True)
class Moments:
    """A mean and a standard deviation."""

    mean: float
    sd: float

    def lognormal(self, rng: random.Random) -> float:
        """Draws a log-normal value with these moments."""
        variance = math.log1p((self.sd / self.mean) ** 2)
        return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))

    def whole(self, rng: random.Random, least: int) -> int:
        """Draws a whole number with these moments: a rounded gamma draw (rounding adds 1/12 to the
        variance)."""
        variance = max(0.01, self.sd**2 - 1 / 12)
        return max(least, round(rng.gammavariate(self.mean**2 / variance, variance / self.mean)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A kind of agent, and the scales of its figures."""

    name: str
    turns: Moments
    tool_s: Moments
    tokens: Moments
    """Tokens in the context at the job's end."""
    output_share: float
    """Share of a turn's added tokens that the model writes; the rest is the tool's result."""
    shared_prefix_tokens: int
    """Tokens of the system prompt and tools, the same for all jobs."""
    task_tokens: int
    """Mean tokens that the first prompt adds to the shared prefix."""
    shapes: tuple[ToolShape, ...]
    assumed: tuple[str, ...]
    """Notes on what was not published."""
    turn_scale: float = 1.0
    token_scale: float = 1.0

    def scaled(self, *, turns: float = 1.0, tokens: float = 1.0) -> Preset:
        """Scales the preset. ``turns`` multiplies the turns, each as large as before (so the context grows
        with them); ``tokens`` multiplies the tokens everywhere."""
        return replace(self, turn_scale=turns, token_scale=tokens)

    @property
    def title(self) -> str:
        """Returns the name with its scales, which requests the same preset."""
        scales = {"turns": self.turn_scale, "tokens": self.token_scale}
        given = ",".join(f"{name}={value:g}" for name, value in scales.items() if value != 1)
        return f"{self.name}:{given}" if given else self.name


# exp(mu) and sigma of log-normal fits per tool and per shell program, as measured in the recording
# agentcgroup-claude (eunomia-bpf/agentcgroup at 5af9e7b). The shares are assumptions.
_SHELL = (
    ToolShape("bash", "cat", 0.22, math.exp(-2.9074), 1.1556),  # as the tool Read
    ToolShape("bash", "grep", 0.20, math.exp(-2.4024), 0.6064),
    ToolShape("bash", "sed", 0.14, math.exp(-3.2076), 0.5039),  # as the tool Edit
    ToolShape("bash", "ls", 0.08, math.exp(-1.6947), 1.4381),
    ToolShape("bash", "find", 0.06, math.exp(-1.2871), 1.5106),
    ToolShape("bash", "git", 0.06, math.exp(-1.8308), 1.1282),
    ToolShape("bash", "python", 0.14, math.exp(-0.3587), 0.9113),
    ToolShape("bash", "pytest", 0.10, math.exp(0.7097), 1.2159),
)
# The slowest tenth of fetch_url calls holds 52.5 % of their time (arXiv 2511.02230, figure 5); of a
# log-normal it holds 1 - Phi(1.2816 - sigma), so sigma is 1.344.
_WEB = (
    ToolShape("web_search", None, 0.55, 1.0, 0.4),
    ToolShape("fetch_url", None, 0.45, 1.5, 1.344),
)
_BUILD = (
    ToolShape("execute_bash", "grep", 0.25, math.exp(-2.4024), 0.6064),
    ToolShape("execute_bash", "find", 0.10, math.exp(-1.2871), 1.5106),
    ToolShape("execute_bash", "go build", 0.10, math.exp(0.6113), 0.7996),  # as pip
    ToolShape("execute_bash", "go test", 0.15, math.exp(0.7097), 1.2159),  # as pytest
    ToolShape("str_replace_editor", None, 0.40, math.exp(-3.2076), 0.5039),
)

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="swe-bench",
            turns=Moments(10.9, 2.1),
            tool_s=Moments(0.925, 3.55),
            tokens=Moments(70_126, 19_732),
            output_share=0.1,
            shared_prefix_tokens=500,
            task_tokens=1_500,
            shapes=_SHELL,
            assumed=("first prompt", "10 % of new tokens are output", "which tools and how often"),
        ),
        Preset(
            name="bfcl",
            turns=Moments(6.3, 2.3),
            tool_s=Moments(1.923, 2.133),
            tokens=Moments(93_256, 68_687),
            output_share=0.03,
            shared_prefix_tokens=1_000,
            task_tokens=200,
            shapes=_WEB,
            assumed=("first prompt", "3 % of new tokens are output", "which tools and how often"),
        ),
        Preset(
            name="openhands",
            turns=Moments(30.0, 10.0),
            tool_s=Moments(1.5, 5.0),
            tokens=Moments(60_000, 20_000),
            output_share=0.15,
            shared_prefix_tokens=6_000,
            task_tokens=1_500,
            shapes=_BUILD,
            assumed=("ALL its figures: none are published for OpenHands",),
        ),
    )
}


def parse_preset(text: str) -> Preset | None:
    """Parses ``swe-bench``, ``swe-bench:turns=2.5,tokens=0.4``; None if no preset has that name.

    WorkloadError if a parameter is unknown, given twice, or not a number above 0 and at most ``MAX_SCALE``.
    """
    name, _, given = text.partition(":")
    if name not in PRESETS:
        return None
    scales: dict[str, float] = {}
    for part in given.split(",") if given else ():
        key, _, value = part.partition("=")
        if key not in ("turns", "tokens"):
            raise WorkloadError(f"The workload {text}: {name} takes turns=X and tokens=X, not {part!r}.")
        if key in scales:
            raise WorkloadError(f"The workload {text}: {key} is given twice.")
        try:
            scales[key] = float(value)
        except ValueError:
            scales[key] = 0.0
        if not 0 < scales[key] <= MAX_SCALE:
            told = f"more than 0 and at most {MAX_SCALE:g}"
            raise WorkloadError(f"The workload {text}: {key} must be {told}, not {value!r}.")
    return PRESETS[name].scaled(**scales)


class JobMaker:
    """Makes the jobs of a preset and a seed; a job with a given number is the same however many are made."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self._preset = preset
        self._seed = seed
        self._tools = _fitted(preset.shapes, preset.tool_s)

    def make(self, index: int) -> Job:
        """Makes the job with this number, from 0."""
        preset = self._preset
        rng = random.Random(f"{preset.name} {self._seed} {index}")
        turns = preset.turns.whole(rng, least=2)
        tokens = preset.tokens.lognormal(rng) * preset.token_scale
        shared = round(preset.shared_prefix_tokens * preset.token_scale)
        first = shared + preset.task_tokens * preset.token_scale * rng.uniform(0.5, 1.5)
        first = min(first, shared + tokens / 4)
        added = max(0.0, tokens - first) / turns
        return Job(
            job_id=f"{preset.name}-{self._seed}-{index}",
            source=preset.title,
            turns=self._turns(rng, max(1, round(first)), added, max(1, round(turns * preset.turn_scale))),
            tokens_measured=False,
            shared_prefix_tokens=shared,
            shared_prefix=preset.name,
        )

    def _turns(self, rng: random.Random, first: int, added: float, num_turns: int) -> tuple[Turn, ...]:
        """Makes turns that add ``added`` tokens each on average: an answer, then (but for the last) a result.

        Results vary much more than answers: gamma with shape 0.7 and 4 (an assumption).
        """
        answers = _parts(rng, self._preset.output_share * added * num_turns, num_turns, shape=4.0)
        results = _parts(rng, (1 - self._preset.output_share) * added * num_turns, num_turns - 1, shape=0.7)
        turns: list[Turn] = []
        context = first
        known = 0
        for index, answer in enumerate(answers):
            turn = Turn(input_tokens=context, prefix_tokens=known, output_tokens=max(1, answer))
            known = context + turn.output_tokens
            if index < num_turns - 1:
                shape, seconds = self._tools.draw(rng)
                call = ToolRun(shape.tool, shape.command, seconds)
                turn = replace(turn, gap_kind=GapKind.TOOL, gap_s=seconds, calls=(call,))
                context = known + max(1, results[index])
            turns.append(turn)
        return tuple(turns)


@cache
def _fitted(shapes: tuple[ToolShape, ...], tool_s: Moments) -> ToolMix:
    return ToolMix.fit(shapes, tool_s.mean, tool_s.sd, TOOL_TIMEOUT_S)


def _parts(rng: random.Random, total: float, num_parts: int, shape: float) -> list[int]:
    """Returns whole numbers that add up to the (rounded) total and vary like gamma draws."""
    summed = list(accumulate((rng.gammavariate(shape, 1.0) for _ in range(num_parts)), initial=0.0))
    scale = total / summed[-1] if summed[-1] else 0.0
    return [round(b * scale) - round(a * scale) for a, b in pairwise(summed)]
