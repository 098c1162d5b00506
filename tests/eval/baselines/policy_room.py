"""A real scheduler with a policy named as on a command line, on a manual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from engine.core.policy import PolicyContext
from engine.records.messages import JobFinished, ToolCall, ToolGapStarted
from eval.baselines.catalog import parse_policy
from tests.core.engine_room import EngineRoom

BLOCK = 4


@dataclass
class PlainKnowledge:
    """Costs that can be computed by hand, and the future that a test defines."""

    prefill_s_per_token: float = 0.1
    reload_s_per_token: float | None = None
    gaps_s: dict[str, float | None] = field(default_factory=dict)
    work_s: dict[str, float] = field(default_factory=dict)

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        return num_tokens * self.prefill_s_per_token

    def reload_s(self, num_tokens: int) -> float | None:
        return None if self.reload_s_per_token is None else num_tokens * self.reload_s_per_token

    def gap_s(self, request_id: str) -> float | None:
        """The gap after a turn; 0 to 9 s unless the test defines it."""
        return self.gaps_s.get(request_id, float(crc32(request_id.encode()) % 10))

    def remaining_s(self, request_id: str) -> float:
        """The remaining work; 1 s unless the test defines it."""
        return self.work_s.get(request_id, 1.0)


class PolicyRoom(EngineRoom):
    """Runs turns of jobs: prompts of one repeated token, continued from the end of the job's last turn."""

    def __init__(
        self,
        policy: str,
        knowledge: PlainKnowledge | None = None,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        num_host_blocks: int = 0,
        async_scheduling: bool = False,
    ) -> None:
        """``num_blocks``: usable blocks of 4 tokens."""
        self.knowledge = knowledge or PlainKnowledge()
        context = PolicyContext(BLOCK, num_blocks, num_host_blocks=num_host_blocks)
        super().__init__(
            parse_policy(policy).make(context, self.knowledge),
            block_size=BLOCK,
            num_blocks=num_blocks + 1,
            max_model_len=256,
            max_num_seqs=max_num_seqs,
            num_host_blocks=num_host_blocks,
            async_scheduling=async_scheduling,
        )
        self._num_turns: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def send(self, job: str, num_new: int, *, max_tokens: int = 1, is_last_step: bool = False) -> str:
        """Adds the job's next turn with ``num_new`` more tokens; returns its request id: job and turn
        number."""
        number = self._num_turns[job] = self._num_turns.get(job, 0) + 1
        last = self._last.get(job)
        history = [] if last is None else list(self.tokens[last])
        request_id = self._last[job] = f"{job}{number}"
        prompt = [*history, *[crc32(job.encode()) % 1000] * num_new]
        self.add(request_id, prompt, max_tokens=max_tokens, job_id=job, is_last_step=is_last_step)
        return request_id

    def play(
        self, job: str, num_new: int, *commands: str, told: bool = True, is_last_step: bool = False
    ) -> str:
        """Runs the job's next turn alone to its end, then reports its shell commands to the policy."""
        request_id = self.send(job, num_new, is_last_step=is_last_step)
        self.run()
        if told and not is_last_step:
            self.tell(job, request_id, *commands)
        return request_id

    def tell(self, job: str, request_id: str, *commands: str) -> None:
        calls = [ToolCall("bash", f'{{"command": "{command}"}}') for command in commands]
        self.scheduler.signal(ToolGapStarted(request_id, calls), self.clock.now())

    def finish_job(self, job: str) -> None:
        self.scheduler.signal(JobFinished(job), self.clock.now())

    @property
    def num_pins(self) -> int:
        return self.scheduler.statistics().num_pins

    @property
    def held_until_s(self) -> float | None:
        """Seconds until the next pin ends; None without pins."""
        due_s = self.scheduler.next_due_s()
        return None if due_s is None else due_s - self.clock.now()

    @property
    def pinned_jobs(self) -> list[str]:
        return sorted(pin.job_id for pin in self.scheduler.policy.pins())

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.scheduler.expire(self.clock.now())

    def run_for(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def starts(self, count: int) -> list[str]:
        """Runs steps; returns the next requests to start, in order."""
        started: list[str] = []
        while len(started) < count:
            plan = self.step()
            started += [new.req_id for new in plan.scheduled_new_reqs]
        return started
