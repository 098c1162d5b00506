"""An engine room with the agent policy, and turns as clients send them: with or without a job name or
counts."""

from __future__ import annotations

from collections.abc import Callable

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext
from engine.core.request import Request
from engine.records.messages import JobRef, ToolCall, ToolGapStarted, TurnReceipt
from tests.core.engine_room import EngineRoom
from tracing.tracer import Tracer

BLOCK = 16


class Kept:
    """Keeps what is traced."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def emit(self, event: object) -> None:
        self.events.append(event)


class JobRoom(EngineRoom):
    """Prompts consist of tokens below ``1000``; the model's tokens are above."""

    def __init__(
        self,
        *,
        num_blocks: int = 129,
        block_size: int = BLOCK,
        tracer: Tracer | None = None,
        on_request_ended: Callable[[Request, float], None] | None = None,
        **options: object,
    ) -> None:
        """``options`` are fields of ContinuumConfig."""
        context = PolicyContext(block_size, num_blocks - 1, tracer)
        self.policy = ContinuumPolicy(context, ContinuumConfig(**options))  # type: ignore[arg-type]
        super().__init__(
            self.policy,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=1024,
            tracer=tracer,
            max_num_batched_tokens=512,
            on_request_ended=on_request_ended,
        )

    def ask(
        self,
        request_id: str,
        prompt: list[int],
        job_id: str | None = None,
        *,
        tenant: str | None = None,
        num_replies: int | None = None,
        num_results: int | None = None,
        last: bool = False,
        prewarms: bool = False,
        parent: str | None = None,
        max_tokens: int = 20,
        cache_salt: str | None = None,
    ) -> Request:
        """Adds a turn; without ``job_id`` its client does not name a job."""
        job = JobRef(job_id, last, tenant, num_replies, num_results, prewarms=prewarms, parent_id=parent)
        return self.add(request_id, prompt, max_tokens=max_tokens, job=job, cache_salt=cache_salt)

    def turn(
        self, request_id: str, prompt: list[int], job_id: str | None = None, **said: object
    ) -> TurnReceipt:
        """Runs a turn from its arrival to its end."""
        self.ask(request_id, prompt, job_id, **said)  # type: ignore[arg-type]
        self.run()
        receipt = self.finished[request_id].receipt
        assert receipt is not None
        return receipt

    def read(self, request_id: str, *commands: str) -> TurnReceipt:
        """Signals that the API server process has read the turn, with its calls or none."""
        calls = [ToolCall("bash", f'{{"command": "{command}"}}') for command in commands]
        receipt = self.scheduler.signal(ToolGapStarted(request_id, calls), self.clock.now())
        assert receipt is not None
        return receipt

    def said(self, request_id: str) -> list[int]:
        """Prompt and reply, as the next prompt begins."""
        return list(self.tokens[request_id])

    @property
    def num_pins(self) -> int:
        return self.scheduler.statistics().num_pins

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.scheduler.expire(self.clock.now())

    def ends(self) -> dict[str, int]:
        """Pins ended since the last call, by cause."""
        return {str(cause): count for cause, count in self.scheduler.make_stats().pins_ended.items()}
