"""The rows of the grid: which jobs run on which hardware. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.errors import EvalError
from eval.sim.roofline import make_cost
from eval.sim.simulate import Hardware, SimulationPlan
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.catalog import PLUS
from eval.workloads.published import PRESETS
from eval.workloads.sampling import JobLimits

MODEL = "llama-3.1-8b"
GPU = "h100"
BLOCK_SIZE = 64
GAP_CAP_S = 600.0
GPU_MEMORY_UTILIZATION = 0.92
HOST_TIER = 4
"""Size of the host tier, as a multiple of the KV pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A workload at several loads."""

    name: str
    parts: tuple[str, ...]
    """Names of recordings, without folder and suffix, and of presets."""
    loads: tuple[float, ...]
    """Jobs per second, from light to heavy."""
    kv_tokens: int
    """Tokens of the KV pool on an H100."""
    model: str = MODEL
    """Model preset of the simulator."""
    host_tiers: tuple[bool, ...] = (False, True)
    """Runs without a host tier (False) and with one (True); with one, all layers form one KV cache group."""
    max_context_tokens: int | None = None
    """Longer jobs are left out; None: jobs that do not fit in the pool."""
    share_prefixes: bool = False

    def workload(self, folder: Path) -> str:
        """Returns the workload's name in the catalog; EvalError if a recording is not in the folder."""
        return PLUS.join(part if part in PRESETS else str(_recording(folder, part)) for part in self.parts)

    def plan(self, folder: Path, gpu: str, num_jobs: int, *, host_tier: bool) -> SimulationPlan:
        """Returns what all its runs share: everything but policy, load and seed.

        On another GPU the pool grows with the memory that is left after the weights.
        """
        grown = _kv_tokens(self.model, gpu) / _kv_tokens(self.model, GPU)
        kv_tokens = int(self.kv_tokens * grown) // BLOCK_SIZE * BLOCK_SIZE
        return SimulationPlan(
            workload=self.workload(folder),
            num_jobs=num_jobs,
            limits=JobLimits(
                max_context_tokens=self.max_context_tokens or kv_tokens - BLOCK_SIZE, gap_cap_s=GAP_CAP_S
            ),
            arrivals=ArrivalKind.POISSON,
            hardware=Hardware(model=self.model, gpu=gpu, kv_tokens=kv_tokens),
            host_kv_tokens=HOST_TIER * kv_tokens if host_tier else 0,
            block_size=BLOCK_SIZE,
            share_prefixes=self.share_prefixes,
        )


TRAFFIC = (
    Traffic(
        name="agentcgroup-claude",
        parts=("agentcgroup-claude",),
        loads=(0.02, 0.05, 0.1, 0.2),
        kv_tokens=300_000,
    ),
    Traffic(name="agentcgroup-glm", parts=("agentcgroup-glm",), loads=(0.05, 0.1), kv_tokens=300_000),
    Traffic(
        name="kv-cache-tester",
        parts=("kv-cache-tester",),
        loads=(0.005, 0.015),
        kv_tokens=400_000,
        max_context_tokens=150_000,
    ),
    Traffic(
        name="mix",
        parts=("agentcgroup-claude", "kv-cache-tester", "bfcl"),
        loads=(0.1, 0.3),
        kv_tokens=400_000,
        max_context_tokens=150_000,
        share_prefixes=True,
    ),
)

GROUPED = (
    Traffic(
        name="agentcgroup-claude-gpt-oss-20b",
        parts=("agentcgroup-claude",),
        loads=(0.2, 0.4),
        kv_tokens=300_000,
        model="gpt-oss-20b",
        host_tiers=(False,),
    ),
    Traffic(
        name="agentcgroup-glm-gpt-oss-20b",
        parts=("agentcgroup-glm",),
        loads=(0.1, 0.2),
        kv_tokens=300_000,
        model="gpt-oss-20b",
        host_tiers=(False,),
    ),
    Traffic(
        name="agentcgroup-claude-qwen3-next-80b-a3b",
        parts=("agentcgroup-claude",),
        loads=(0.2,),
        kv_tokens=600_000,
        model="qwen3-next-80b-a3b",
        host_tiers=(False,),
    ),
)
"""Models with several KV cache groups, at loads where their KV is short; they run only when named."""

ROWS = {traffic.name: traffic for traffic in (*TRAFFIC, *GROUPED)}


def chosen(only: str | None) -> Sequence[Traffic]:
    """Returns the named rows (comma-separated); TRAFFIC by default. EvalError for an unknown name."""
    if only is None:
        return TRAFFIC
    names = only.split(",")
    for name in names:
        if name not in ROWS:
            raise EvalError(f"The bench has no workload {name!r}; it has {', '.join(ROWS)}.")
    return [traffic for name, traffic in ROWS.items() if name in names]


def _recording(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise EvalError(f"There is no recording {path}: name the folder that has it with --workloads.")
    return path


def _kv_tokens(model: str, gpu: str) -> int:
    return make_cost(model, gpu).kv_tokens(GPU_MEMORY_UTILIZATION)
