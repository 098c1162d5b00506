"""An executor that records the worker's drafts, and the model's tokens in their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import PendingOutput
from engine.worker.executor import UniProcExecutor


@dataclass
class DraftRecord:
    """Sampled tokens and drafts, by request."""

    said: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    drafted: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """Request, its number of sampled tokens, and the drafts of the next ones."""

    chances: list[Sequence[float]] = field(default_factory=list)
    """Chances of each entry's drafts."""

    def note(self, output: ModelRunnerOutput) -> None:
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.said[req_id] += tokens
        for req_id, drafts in output.drafts.items():
            self.drafted.append((req_id, len(self.said[req_id]), drafts.token_ids))
            self.chances.append(drafts.chances)

    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of drafted and sampled token, up to the first wrong draft of each entry."""
        compared = []
        for req_id, start, drafts in self.drafted:
            for drafted, said in zip(drafts, self.said[req_id][start:], strict=False):
                compared.append((drafted, said))
                if drafted != said:
                    break
        return compared

    def accepted_share(self) -> float:
        pairs = self.pairs()
        return sum(drafted == said for drafted, said in pairs) / len(pairs)


class RecordingExecutor(UniProcExecutor):
    """A UniProcExecutor with a record; ``last`` is the latest one."""

    last: RecordingExecutor

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.record = DraftRecord()
        self.num_steps = 0
        self.num_preemptions = 0
        RecordingExecutor.last = self

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        pending = super().submit(plan)
        self.num_steps += bool(plan.total_num_scheduled_tokens)
        self.num_preemptions += len(plan.preempted_req_ids)
        return _Noted(pending, self.record)


@dataclass
class _Noted:
    pending: PendingOutput
    record: DraftRecord

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        self.record.note(output)
        return output
