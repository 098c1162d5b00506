"""An engine core in the caller's own process."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec

from engine.clock import Clock
from engine.config.engine_config import EngineConfig
from engine.core.policy import PolicyFactory
from engine.core_process.engine_core import EngineCore
from engine.executor import ExecutorFactory
from engine.records.messages import (
    AbortRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
)


class InprocClient:
    """The core in the caller's own process and thread: each ``get_output`` is a step."""

    def __init__(
        self,
        config: EngineConfig,
        executor_factory: ExecutorFactory,
        policy_factory: PolicyFactory,
        clock: Clock,
    ) -> None:
        self.core = EngineCore(config, executor_factory, policy_factory, clock)
        # Also run at exit and when the client is garbage collected, as for a core in a separate process.
        self._close_core = weakref.finalize(self, self.core.close)
        self._early: list[EngineCoreOutput] = []
        """Outputs that no step produced: errors of new requests, and aborts."""

    def await_ready(self) -> EngineReady:
        return self.core.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        self._early += self.core.add_request(request)

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        self._early += self.core.abort_requests(AbortRequest(request_ids, stopped))

    def get_output(self) -> EngineCoreOutputs:
        if self._early:
            early = self._early
            self._early = []
            return EngineCoreOutputs(outputs=early, timestamp=self.core.now())
        self.core.wait_for_work()
        return self.core.step() or EngineCoreOutputs(timestamp=self.core.now())

    def call_utility(self, method: str, *args: object) -> Any:
        while self.core.is_draining:  # in a separate process the core does this by itself
            self.core.wait_for_work()
            outputs = self.core.step()
            self._early += outputs.outputs if outputs is not None else []
        return msgspec.to_builtins(self.core.call_utility(method, list(args)))

    def close(self) -> None:
        self._close_core()
