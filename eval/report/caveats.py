"""The notes below a comparison, which qualify its figures."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.report.comparison import Comparison, Load, Series
from eval.report.metrics import RunResult

_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-]|[.,]\d)")
"""A separate number, unlike the 8 of llama-3.1-8b."""
_RECOMPUTED = (
    "recomputed: prompt tokens that the job's previous turn had and the cache did not give back "
    "(by receipts, else by the usage counts, where up to one KV block a turn counts in any case)"
)
_INTERVALS = (
    "±: 95 % confidence interval over seeds (Student's t; Jain 1991, 13.2); a figure is the mean over seeds, "
    "a ratio the geometric mean by seed with the interval of its logarithm (13.4.1)"
)

_TOLD_FLAGS = {
    *("--workload", "--model", "--gpu", "--tensor-parallel", "--dtype", "--replicas", "--ttft-limit-s"),
    *("--policies", "--jobs", "--seed", "--seeds", "--first-seed"),
    *("--rate", "--arrivals", "--burstiness", "--concurrency"),
    *("--name", "--base-url", "--api-key", "--json", "--html", "--records", "--resume", "--against"),
}
"""Flags whose effect a result shows elsewhere, or that have no effect on it."""


@dataclass(frozen=True, slots=True)
class Caveats:
    """The notes in the order of their weight: errors, differences, assumptions, definitions."""

    warnings: list[str]
    differences: list[str]
    assumptions: list[str]
    definitions: list[str]

    @classmethod
    def of(cls, comparison: Comparison) -> Caveats:
        return cls(
            [text for series in comparison.series for text in _warnings(series)],
            _differences(comparison),
            _assumptions(comparison),
            _definitions(comparison),
        )


def _warnings(series: Series) -> list[str]:
    errors = sum(run.num_errors for run in series.runs)
    lost = sum(run.num_jobs - run.num_completed_jobs for run in series.runs)
    cut = sum(run.num_cut_jobs for run in series.runs)
    unlike = sum(run.num_unlike_recording for run in series.runs)
    jobs = sum(run.num_jobs for run in series.runs)
    texts = []
    if errors or lost:
        texts.append(
            f"{series.label}: {errors} turns failed and {lost} of {jobs} jobs did not end; "
            "job completion counts the others only"
        )
    if cut:
        texts.append(f"{series.label}: {cut} of {jobs} jobs were cut at the last turn within the limits")
    if unlike:
        texts.append(
            f"{series.label}: {unlike} answers differ from the recording "
            "(tokens were not forced), so later prompts share less with earlier turns"
        )
    return texts


def _differences(comparison: Comparison) -> list[str]:
    """Returns differences from the baseline besides the policy; series with equal ones share a sentence."""
    owners: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for series in comparison.series:
        baseline = comparison.baseline(series)
        if baseline is not series:
            commands = [comparison.files[one.source].command for one in (series, baseline)]
            for text in [
                *_unlike(series, baseline),
                *_unlike_loads(comparison.loads, series, baseline),
                *_unlike_flags(*commands),
            ]:
                owners[baseline.label, text].append(series.label)
    return [f"{', '.join(labels)} compared with {base}: {text}" for (base, text), labels in owners.items()]


def _unlike(series: Series, baseline: Series) -> list[str]:
    ours = series.setting
    theirs = baseline.setting
    texts = []
    if ours.workload != theirs.workload:
        told = f"{ours.workload or 'not named'}, not {theirs.workload or 'not named'}"
        texts.append(f"another workload ({told}), so the ratios compare different work")
    if ours.model != theirs.model:
        texts.append(f"another model ({ours.model}, not {theirs.model})")
    if ours.hardware != theirs.hardware:
        told = f"{ours.hardware or 'not named'}; there: {theirs.hardware or 'not named'}"
        texts.append(f"other hardware ({told})")
    if ours.num_replicas != theirs.num_replicas:
        texts.append(f"{ours.num_replicas} replicas, not {theirs.num_replicas}")
    if ours.simulated != theirs.simulated:
        texts.append("simulated, not measured" if ours.simulated else "measured, not simulated")
    limits = [sorted({run.ttft_limit_s for run in one.runs}) for one in (series, baseline)]
    if limits[0] != limits[1]:
        texts.append(f"another TTFT limit of goodput ({_listed(limits[0])} s, not {_listed(limits[1])} s)")
    return texts


def _unlike_loads(loads: list[Load], series: Series, baseline: Series) -> list[str]:
    """Returns loads that only one series has, and different seeds or numbers of jobs at common ones."""
    at: defaultdict[str, list[str]] = defaultdict(list)
    for load in loads:
        ours = series.at(load)
        theirs = baseline.at(load)
        if not ours and not theirs:
            continue
        if not ours or not theirs:
            at[f"no run of {baseline.label if ours else 'its own'}"].append(str(load))
            continue
        seeds = [sorted(_seed(run) for run in runs) for runs in (ours, theirs)]
        if seeds[0] != seeds[1]:
            told = f"seeds {', '.join(seeds[0])}, not {', '.join(seeds[1])}"
            at[f"{told}; ratios are by the seeds that both have, else without an interval"].append(str(load))
        jobs = [sorted({run.num_jobs for run in runs}) for runs in (ours, theirs)]
        if jobs[0] != jobs[1]:
            at[f"{_listed(jobs[0])} jobs, not {_listed(jobs[1])}"].append(str(load))
        elif other := _other_work(ours, theirs):
            at[other].append(str(load))
    return [f"{text} (at {'; '.join(where)})" for text, where in at.items()]


def _other_work(ours: list[RunResult], theirs: list[RunResult]) -> str | None:
    """A note if runs with equal seed and number of jobs had different jobs: cut or chosen differently."""
    work = {run.setting.seed: _num_turns(run) for run in theirs}
    pairs = [(_num_turns(run), work[run.setting.seed]) for run in ours if run.setting.seed in work]
    return next((f"other jobs: of {a:,} turns, not {b:,}" for a, b in pairs if a != b), None)


def _num_turns(run: RunResult) -> int:
    return sum(job.num_planned_turns for job in run.jobs)


def _unlike_flags(ours: str, theirs: str) -> list[str]:
    """Returns differences in the flags of two commands, unless shown elsewhere."""
    (name, our_flags), (other, their_flags) = _flags(ours), _flags(theirs)
    if name != other:
        return []
    texts = []
    for flag in sorted({*our_flags, *their_flags} - _TOLD_FLAGS):
        mine = our_flags.get(flag)
        its = their_flags.get(flag)
        if mine is None:
            texts.append(f"without {flag} {its}".rstrip())
        elif its is None:
            texts.append(f"with {flag} {mine}".rstrip())
        elif mine != its:
            texts.append(f"with {flag} {mine}, not {its}")
    return texts


def _flags(command: str) -> tuple[str, dict[str, str]]:
    """Returns the sub-command, and each flag with its value."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:
        return "", {}
    flags: dict[str, str] = {}
    flag = ""
    for word in words[1:]:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            flags[flag] = value
        else:
            flags[flag] = word
    return words[0] if words else "", flags


def _seed(run: RunResult) -> str:
    return "unknown" if run.setting.seed is None else str(run.setting.seed)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _assumptions(comparison: Comparison) -> list[str]:
    """Returns notes of the files, then those of runs; a note that only some series have names those."""
    texts = list(dict.fromkeys(note for file in comparison.files for note in file.notes))
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for series in comparison.series:
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for run in series.runs:
            for note in run.notes:
                alike[_NUMBER.sub("#", note)].append(note)
        for notes in alike.values():
            owners[_merged(notes)].append(series.label)
    for text, labels in owners.items():
        shared = len(labels) == len(comparison.series)
        texts.append(text if shared else f"{', '.join(labels)}: {text}")
    return list(dict.fromkeys(texts))


def _merged(notes: list[str]) -> str:
    """Merges sentences that differ only in numbers into one, with ranges such as ``98 to 111``."""
    columns = zip(*(_NUMBER.findall(note) for note in notes), strict=True)
    told = iter([_span(column) for column in columns])
    return _NUMBER.sub(lambda _: next(told), notes[0])


def _span(numbers: Sequence[str]) -> str:
    low, high = (pick(numbers, key=lambda text: float(text.replace(",", ""))) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _definitions(comparison: Comparison) -> list[str]:
    """Returns definitions of the figures that these runs have."""
    runs = comparison.runs
    texts = [
        "job completion (JCT): from a job's arrival to its last answer, tool calls included",
        _RECOMPUTED,
    ]
    texts += _told(
        runs,
        lambda run: bool(run.pins_ended),
        "wasted: KV that was pinned and that no turn took over, as a share of the KV pool times the run",
    )
    texts += _told(
        runs,
        lambda run: not run.setting.simulated,
        "longest wait: in the queue, if known; of a server, to the first token",
    )
    limits = sorted({run.ttft_limit_s for run in runs})
    if limits:
        texts.append(f"goodput: turns with a TTFT of at most {_listed(limits)} s, per second of the run")
    if any(len(series.at(load)) > 1 for series in comparison.series for load in comparison.loads):
        texts.append(_INTERVALS)
    elif len(comparison.series) > 1:
        texts.append("one seed each: no confidence intervals")
    return texts + _baselines(comparison)


def _told(runs: list[RunResult], when: Callable[[RunResult], bool], text: str) -> list[str]:
    return [text] if any(when(run) for run in runs) else []


def _baselines(comparison: Comparison) -> list[str]:
    """Returns the baselines of the ratios, in one sentence if there is only one."""
    pairs = [(series, comparison.baseline(series)) for series in comparison.series]
    bases = {base.label: None for series, base in pairs if base is not series}
    if len(bases) < 2:
        return [f"ratios: to {base}" for base in bases]
    return ["ratios: " + ", ".join(f"{one.label} to {base.label}" for one, base in pairs if base is not one)]
