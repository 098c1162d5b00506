"""Knowledge that only a simulation has: the length of each gap and the remaining work of each job."""

from __future__ import annotations

from collections.abc import Mapping

from eval.sim.cost_model import StepCost, StepWork
from eval.sim.kv_sizes import KvSizes
from eval.workloads.job import Job, Turn


class Foresight:
    """Implements ``eval.baselines.knowledge.Knowledge`` from the jobs themselves."""

    def __init__(self, jobs: Mapping[str, Job], cost: StepCost, host_sizes: KvSizes | None = None) -> None:
        """``host_sizes``: sizes of copies in the host tier; None without one."""
        self._jobs = jobs
        self._cost = cost
        self._host_sizes = host_sizes
        self._remaining_s: dict[str, list[float]] = {}

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        return self._cost.prefill_s(num_tokens, context_tokens)

    def reload_s(self, num_tokens: int) -> float | None:
        sizes = self._host_sizes
        return None if sizes is None else self._cost.copy_s(sizes.num_loaded_tokens(num_tokens))

    def gap_s(self, request_id: str) -> float | None:
        """Returns the gap without sub-agents, whose time is unknown before they have run."""
        job, index = self._turn(request_id)
        if index + 1 == len(job.turns):
            return None
        on_the_way_s = self._cost.reply_overhead_s + self._cost.arrival_overhead_s
        return (job.turns[index].gap_s or 0.0) + on_the_way_s

    def remaining_s(self, request_id: str) -> float:
        job, index = self._turn(request_id)
        remaining_s = self._remaining_s.get(job.job_id)
        if remaining_s is None:
            remaining_s = self._remaining_s[job.job_id] = self._sums(job)
        return remaining_s[index]

    def _turn(self, request_id: str) -> tuple[Job, int]:
        job_id, _, index = request_id.rpartition("/")
        return self._jobs[job_id], int(index)

    def _sums(self, job: Job) -> list[float]:
        sums = []
        total_s = 0.0
        for turn in reversed(job.turns):
            total_s += self._turn_s(turn)
            sums.append(total_s)
        return sums[::-1]

    def _turn_s(self, turn: Turn) -> float:
        context = turn.input_tokens + turn.output_tokens // 2
        decode = StepWork(num_decodes=1, decode_context_tokens=context)
        new_s = self._cost.prefill_s(turn.new_input_tokens, turn.prefix_tokens)
        return new_s + (turn.sampled_tokens - 1) * self._cost.step_s(decode)
