"""The Continuum paper's published settings and results, and those not reproduced here. Data only.

Source: arXiv 2511.02230, v6, unless a figure says otherwise. Seconds were read off plots by eye (within 5 %),
at the highest load that is plotted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

GB = 1e9
NEAR = 1.2
"""A multiple is reproduced within this factor of the published one, unless a figure says otherwise."""
BASELINE = "fcfs"
"""The policy of vLLM, the baseline of every multiple."""
RULE = "paper"
"""Continuum as published."""
OURS = "continuum"
ORDER = "program-fcfs"
"""The order of programs without any pins."""
IN_THAT_ORDER = (RULE, "infercept")
"""Policies that also pin: their gain is compared with the gain of the order alone."""
PEERS = ("plas", "infercept")
"""The other systems of the plots, which ``--quick`` leaves out."""
UNLIKE = {
    "plas": (
        "plas has priorities of programs in place of levels and preempts only where blocks run out; how the "
        "published Autellix was built is not in our source"
    ),
    "infercept": (
        "infercept keeps a program's place in the queue across tool calls, as its own paper keeps a "
        "request's; whether the published one did is not in our source"
    ),
}
"""Known differences between a policy and the published system that it represents."""


@dataclass(frozen=True, slots=True)
class PublishedEngine:
    """An engine whose sizes and step times were published."""

    profile: Path
    """Its step times, as ``continuum profile`` writes them."""
    kv_tokens: int
    step_tokens: int
    max_num_seqs: int


class Measure(Enum):
    """The quantity of a run that was published."""

    MEAN = "mean"
    P95 = "p95"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One system in one setting."""

    system: str
    """The paper's name for it."""
    policy: str
    """The policy that represents it here."""
    seconds: float | None = None
    """Published job delay."""
    multiple: float | None = None
    """Delay of vLLM over this system's, if it was printed; else computed from the seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of a plot: hardware, workload, load and delays."""

    model: str
    gpu: str
    tensor_parallel: int = 1
    workload: str
    jobs_per_s: float | None
    """Arrival rate; None: a fixed number of jobs at once."""
    concurrency: int | None = None
    host_gb: float = 0.0
    """Host memory for KV, all GPUs together, in 1e9 bytes."""
    engine: PublishedEngine | None = None
    """Sizes and step times, where they are published; None: the paper's, with step times by roofline."""
    arrivals_s: float | None = None
    """How long jobs arrive; None: their number is that of the command line."""
    measure: Measure = Measure.MEAN
    published: tuple[Published, ...]
    """The systems, the baseline first."""
    steps: tuple[tuple[str, str], ...] = ()
    """Pairs of policies; each shows what the first adds to the second."""

    @property
    def title(self) -> str:
        """Returns hardware, workload, host memory and load in one line."""
        number = "" if self.tensor_parallel == 1 else f"{self.tensor_parallel} x "
        host = f", {self.host_gb:g} GB host" if self.host_gb else ""
        told = (
            f"{self.concurrency} jobs at once" if self.jobs_per_s is None else f"{self.jobs_per_s:g} jobs/s"
        )
        return f"{self.model} on {number}{self.gpu}{host}, {self.workload}, {told}"

    @property
    def policies(self) -> list[str]:
        """Returns the policies to run: the published ones, then this project's."""
        return list(dict.fromkeys([*(one.policy for one in self.published), OURS]))

    def system(self, policy: str) -> Published | None:
        """Returns the published system that ``policy`` represents."""
        return next((one for one in self.published if one.policy == policy), None)

    def multiple(self, policy: str, base: str = BASELINE) -> float | None:
        """Returns the delay of ``base``, by default vLLM's, over that of the system that ``policy``
        represents; None if it was not published."""
        one = self.system(policy)
        other = self.system(base)
        if one is None or other is None or one is other:
            return None
        if one.multiple is not None and base == BASELINE:
            return one.multiple
        return None if one.seconds is None or other.seconds is None else other.seconds / one.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """The results of one plot or table."""

    name: str
    """Its name on the command line."""
    title: str
    source: str
    settings: tuple[Setting, ...]
    read_off_plot: bool = True
    """Whether the seconds were read off a plot, which the tables mark."""
    tolerance: float = NEAR
    is_other_reading: bool = False
    """Whether these figures repeat others under another reading of the workload; counted separately."""
    needs_pressure: bool = True
    """Whether an effect shows only if memory is short: then a load above the published one is searched at
    which it is."""


def _delays(
    vllm: float, continuum: float, autellix: float | None = None, infercept: float | None = None
) -> tuple[Published, ...]:
    """Returns the systems of one plot with their seconds."""
    found = [
        Published(system="vLLM", policy=BASELINE, seconds=vllm),
        Published(system="Continuum", policy=RULE, seconds=continuum),
    ]
    if autellix is not None:
        found.append(Published(system="Autellix", policy="plas", seconds=autellix))
    if infercept is not None:
        found.append(Published(system="InferCept", policy="infercept", seconds=infercept))
    return tuple(found)


def _ablation(vllm: float, ordered: float, static: float, full: float) -> tuple[Published, ...]:
    return (
        Published(system="vLLM", policy=BASELINE, seconds=vllm),
        Published(system="+ program FCFS", policy="program-fcfs", seconds=ordered),
        Published(system="+ static TTL", policy="fixed-ttl:2", seconds=static),
        Published(system="full", policy=RULE, seconds=full),
    )


def _systems(*, multiple: float | None = None, autellix: bool = False) -> tuple[Published, ...]:
    """Returns systems without published seconds."""
    return (
        Published(system="vLLM", policy=BASELINE),
        Published(system="Continuum", policy=RULE, multiple=multiple),
        *([Published(system="Autellix", policy="plas", multiple=multiple)] if autellix else []),
    )


def _labels(vllm: float, autellix: float, infercept: float) -> tuple[Published, ...]:
    """Converts printed multiples of Continuum's delay into multiples of vLLM's."""
    return (
        Published(system="vLLM", policy=BASELINE),
        Published(system="Continuum", policy=RULE, multiple=vllm),
        Published(system="Autellix", policy="plas", multiple=vllm / autellix),
        Published(system="InferCept", policy="infercept", multiple=vllm / infercept),
    )


def _on_hardware(
    workload: str, rates: Sequence[float], delays: Sequence[tuple[Published, ...]], *, offload: bool = False
) -> tuple[Setting, ...]:
    """The three pairs of model and GPU that have presets: 200 GB of host memory per B200, 100 GB per A100."""
    machines = (
        ("llama-3.1-70b", "b200", 4, 800.0),
        ("llama-3.1-8b", "b200", 1, 200.0),
        ("llama-3.1-8b", "a100-80", 1, 100.0),
    )
    return tuple(
        Setting(
            model=model,
            gpu=gpu,
            tensor_parallel=number,
            workload=workload,
            jobs_per_s=rate,
            host_gb=host_gb if offload else 0.0,
            published=published,
        )
        for (model, gpu, number, host_gb), rate, published in zip(machines, rates, delays, strict=True)
    )


def _b200(
    workload: str,
    jobs_per_s: float,
    published: tuple[Published, ...],
    *,
    host_gb: float = 0.0,
    measure: Measure = Measure.MEAN,
    steps: tuple[tuple[str, str], ...] = (),
) -> Setting:
    return Setting(
        model="llama-3.1-8b",
        gpu="b200",
        workload=workload,
        jobs_per_s=jobs_per_s,
        host_gb=host_gb,
        measure=measure,
        published=published,
        steps=steps,
    )


def _h100(jobs_per_s: float, published: tuple[Published, ...], measure: Measure = Measure.MEAN) -> Setting:
    return Setting(
        model="llama-3.1-8b",
        gpu="h100",
        workload="openhands",
        jobs_per_s=jobs_per_s,
        measure=measure,
        published=published,
    )


TURNS = (10.9, 50.6)
"""Turns per job at both ends of figure 14."""
MANY_TURNS = f"swe-bench:turns={TURNS[1] / TURNS[0]:.4g},tokens={TURNS[0] / TURNS[1]:.4g}"
"""As many turns as in the paper, in the same context: the paper does not say how it scaled, but 4.6 times the
tokens would not fit the model."""
_ALIKE = _systems(multiple=1.0, autellix=True)
SHORT_BFCL = "bfcl:tokens=0.4"
"""Table 2's tokens of BFCL cannot all be below the 128k to which its jobs were shortened, by 0.4: they may be
the numbers before that. (sd 68,687 around a mean of 93,256; below 128k it is 60k at most.)"""
_BFCL = (_delays(428, 372, 412), _delays(317, 213, 293), _delays(645, 490, 660))
_BFCL_OFFLOAD = (
    _delays(453, 437, 468, 452),
    _delays(239, 225, 258, 243),
    _delays(610, 480, 548, 612),
)
_STEPS = (("fixed-ttl:2", "program-fcfs"), (RULE, "fixed-ttl:2"))

_STUDY_KV_TOKENS = {"h100": 434_000, "h200": 868_000}
_STUDY = (
    "hungchun0201/agentic-ai-survey, bottleneck analysis 1.3, with its own line of an H100's step times; "
    "ASSUMED: 45 s of arrivals, which fit all its seconds of vLLM at once, vLLM's sizes of a step, and the "
    "same step times for an H200, which computes as fast (its own line for that makes vLLM 1.4 to 1.8x slow)"
)


def _eight_turns(gpu: str, jobs_per_s: float, *published: Published, host_gb: float = 0.0) -> Setting:
    engine = PublishedEngine(
        Path(__file__).with_name("eight-turns-h100.json"),
        kv_tokens=_STUDY_KV_TOKENS[gpu],
        step_tokens=8192,
        max_num_seqs=1024,
    )
    return Setting(
        model="llama-3.1-8b",
        gpu=gpu,
        workload="eight-turns",
        jobs_per_s=jobs_per_s,
        host_gb=host_gb,
        engine=engine,
        arrivals_s=45.0,
        published=published,
    )


def _of_preview(gpu: str, jobs_per_s: float, vllm: float, preview: float) -> Setting:
    return _eight_turns(
        gpu,
        jobs_per_s,
        Published(system="vLLM", policy=BASELINE, seconds=vllm),
        Published(system="preview", policy="fork", seconds=preview),
    )


def _of_lmcache(gpu: str, jobs_per_s: float, seconds: float) -> Setting:
    lmcache = Published(system="vLLM + LMCache", policy=BASELINE, seconds=seconds)
    return _eight_turns(gpu, jobs_per_s, lmcache, host_gb=400)


FIGURES = (
    PaperFigure(
        name="low-load",
        title="at the lowest load all curves coincide",
        source="figs. 8 and 10; a tenth of the highest load is taken",
        settings=(
            _b200("swe-bench", 0.013, _ALIKE),
            Setting(
                model="llama-3.1-8b",
                gpu="a100-80",
                workload="swe-bench",
                jobs_per_s=0.009,
                published=_ALIKE,
            ),
            _b200("bfcl", 0.5, _ALIKE),
        ),
        tolerance=1.02,
        needs_pressure=False,
    ),
    PaperFigure(
        name="fig8-swe",
        title="delay against arrival rate, SWE-Bench, no offload",
        source="fig. 8",
        settings=_on_hardware(
            "swe-bench",
            (0.11, 0.13, 0.09),
            (_delays(2760, 1630, 4820), _delays(2020, 1220, 3690), _delays(5190, 3330, 13200)),
        ),
    ),
    PaperFigure(
        name="fig8-bfcl",
        title="delay against arrival rate, BFCL, no offload",
        source="fig. 8",
        settings=_on_hardware("bfcl", (5, 5, 2), _BFCL),
    ),
    PaperFigure(
        name="rates",
        title="our delay against arrival rate, no offload",
        source="the curves of fig. 8; of theirs our source has only the seconds at the highest load",
        settings=(
            *(_b200("swe-bench", rate, _systems()) for rate in (0.07, 0.13, 0.2, 0.26)),
            *(_b200("bfcl", rate, _systems()) for rate in (0.2, 1, 3.5, 5)),
        ),
        needs_pressure=False,
    ),
    PaperFigure(
        name="fig9",
        title="delay against arrival rate, OpenHands, no offload",
        source="fig. 9; only the name of its jobs is published: all their figures are ASSUMED",
        settings=(
            _h100(0.03, _delays(4000, 1240, 5530)),
            _h100(0.05, _delays(5060, 1700, 6700)),
            _h100(0.05, _delays(8950, 3200, 12400), Measure.P95),
        ),
    ),
    PaperFigure(
        name="fig10-swe",
        title="delay against arrival rate, SWE-Bench, with DRAM offload",
        source="fig. 10",
        settings=(
            *_on_hardware(
                "swe-bench",
                (0.11, 0.13, 0.09),
                (
                    _delays(2850, 1700, 5000, 2830),
                    _delays(1810, 1130, 1880, 1640),
                    _delays(5180, 2950, 5650, 4330),
                ),
                offload=True,
            ),
            _b200(
                "swe-bench",
                0.13,
                _delays(2850, 1790, infercept=2620),
                host_gb=200.0,
                measure=Measure.P95,
            ),
        ),
    ),
    PaperFigure(
        name="fig10-bfcl",
        title="delay against arrival rate, BFCL, with DRAM offload",
        source="fig. 10",
        settings=_on_hardware("bfcl", (5, 5, 2), _BFCL_OFFLOAD, offload=True),
    ),
    PaperFigure(
        name="bfcl-short",
        title="BFCL again, table 2's tokens taken as those before jobs were shortened, times 0.4",
        source="figs. 8 and 10",
        settings=(
            *_on_hardware(SHORT_BFCL, (5, 5, 2), _BFCL),
            *_on_hardware(SHORT_BFCL, (5, 5, 2), _BFCL_OFFLOAD, offload=True),
        ),
        is_other_reading=True,
    ),
    PaperFigure(
        name="fig14",
        title="turn scaling, 10.9 to 50.6 turns, with DRAM offload",
        source="fig. 14; labels are printed, Continuum stays at about 1000 to 1100 s",
        settings=(
            _b200("swe-bench", 0.13, _labels(1.6, 1.7, 1.4), host_gb=200.0),
            _b200(MANY_TURNS, 0.13, _labels(3.7, 2.5, 2.2), host_gb=200.0),
        ),
        read_off_plot=False,
    ),
    PaperFigure(
        name="fig16",
        title="ablation: vLLM, + program FCFS, + static TTL, full",
        source="fig. 16; the static TTL is taken to be the preview's 2 s",
        settings=(
            _b200("swe-bench", 0.11, _ablation(1950, 1640, 1180, 1165), steps=_STEPS),
            _b200("bfcl", 3.5, _ablation(311, 270, 226, 209), steps=_STEPS),
        ),
    ),
    PaperFigure(
        name="preview",
        title="the preview code's shipped results, SWE-Bench Verified, 64 workers",
        source=(
            "results.json of the preview code: 500 jobs of Llama's own, of which 98 with vLLM and 10 "
            "with the preview reached the client's limit of 900 s"
        ),
        settings=(
            Setting(
                model="llama-3.1-70b",
                gpu="h100",
                tensor_parallel=4,
                workload="swe-bench",
                jobs_per_s=None,
                concurrency=64,
                published=(
                    Published(system="vLLM", policy=BASELINE, seconds=465.2),
                    Published(system="preview", policy="fork", seconds=215.5),
                ),
            ),
        ),
        read_off_plot=False,
    ),
    PaperFigure(
        name="eight-turns",
        title="an independent measurement of the preview: eight turns that grow to 13,193 tokens",
        source=_STUDY,
        settings=(
            _of_preview("h100", 1, 9.01, 8.75),
            _of_preview("h100", 3, 68.9, 39.8),
            _of_preview("h100", 6, 244.0, 100.0),
            _of_preview("h100", 10, 456.0, 173.0),
            _of_preview("h100", 15, 739.0, 260.0),
            _of_preview("h200", 1, 8.55, 8.67),
            _of_preview("h200", 3, 28.1, 20.7),
            _of_preview("h200", 6, 192.0, 66.0),
            _of_preview("h200", 10, 417.0, 119.0),
            _of_preview("h200", 15, 703.0, 185.0),
        ),
        read_off_plot=False,
        needs_pressure=False,
    ),
    PaperFigure(
        name="eight-turns-dram",
        title="the same with 400 GB of host memory, as vLLM with LMCache",
        source=_STUDY,
        settings=(
            _of_lmcache("h100", 1, 10.2),
            _of_lmcache("h100", 3, 27.5),
            _of_lmcache("h100", 6, 65.9),
            _of_lmcache("h100", 10, 165.0),
            _of_lmcache("h100", 15, 689.0),
            _of_lmcache("h200", 1, 9.75),
            _of_lmcache("h200", 3, 24.3),
            _of_lmcache("h200", 6, 63.2),
            _of_lmcache("h200", 10, 159.0),
            _of_lmcache("h200", 15, 685.0),
        ),
        read_off_plot=False,
        needs_pressure=False,
    ),
)

LEFT_OUT = (
    "eight-turns with 16 and 64 GB of host memory: slower than none there, as stores cost time there alone",
    "Gemma-3 12B on an A100 (figs. 8 and 10): there is no preset of it",
    "figs. 8 to 10 between the lowest and the highest load, fig. 14 between its ends: not in our source",
    "throughput (1.10x to 3.22x): only the ends of the range are known",
    "P90 (fig. 10): results keep P95, which is run",
    "batch size and chunk size (fig. 13: 1.3x to 1.9x, 1.3x to 2.0x): only the ends of the ranges are known",
    "an SSD tier (400 and 800 GB): the simulator's host tier is memory",
    "the real SWE-agent against SGLang and Dynamo (fig. 12, up to 8.18x): other servers on real GPUs",
    "scheduling time per step (table 4): a simulation charges a constant for it",
    "RL rollout of GLM-4.5 (table 5): neither its jobs nor its number of workers are published",
)
"""Figures that are not reproduced here, and why."""
