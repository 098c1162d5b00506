"""The synchronous engine: adds requests, steps, returns finished outputs."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

from engine.clock import MonotonicClock
from engine.config.engine_config import EngineConfig
from engine.core.policy import PolicyFactory
from engine.core.scheduler_report import SchedulerStatistics
from engine.core_process.client_protocols import SyncCoreClient
from engine.core_process.core_client import SyncMPClient
from engine.errors import EngineDeadError, EngineGenerateError, RequestError
from engine.executor import ExecutorFactory
from engine.frontend.engine_operations import REST_POLL_S
from engine.frontend.input_processor import GenerationDefaults, InputProcessor
from engine.frontend.kv_transfer import KVTransferDoor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_output import RequestOutput
from engine.frontend.stats import IterationStats
from engine.records.adapters import Adapter
from engine.records.messages import NO_CONTEXT, EngineCoreRequest, RequestContext
from engine.records.reported_stats import SchedulerStats
from engine.records.sampling_params import SamplingParams
from engine.tokenization.no_tokenizer import load_tokenizer

T = TypeVar("T")


class LLMEngine:
    """Connects input processing, the core and output processing, for one thread."""

    def __init__(
        self,
        config: EngineConfig,
        executor_factory: ExecutorFactory,
        policy_factory: PolicyFactory,
        *,
        multiprocess: bool = True,
    ) -> None:
        self.config = config
        self._sleeps = False
        self._clock = MonotonicClock()
        self._client: SyncCoreClient
        if multiprocess:
            self._client = SyncMPClient(config, executor_factory, policy_factory)
        else:
            from engine.core_process.inproc_client import InprocClient  # imports the whole core

            self._client = InprocClient(config, executor_factory, policy_factory, self._clock)
        try:  # while a core in another process loads the model
            self.tokenizer = load_tokenizer(config.model)
            self.generation_defaults = GenerationDefaults.load(config.model)
            self.ready = self._client.await_ready()
        except BaseException:
            self._client.close()
            raise
        self._inputs = InputProcessor(self.tokenizer, self.ready, self.generation_defaults)
        self._outputs = OutputProcessor(
            self.tokenizer, self._clock, stream_interval=config.scheduler.stream_interval
        )
        self._outputs.kv_transfer = self.kv_transfer = KVTransferDoor(config)
        self.iteration_stats: IterationStats | None = None
        """Statistics of the last step."""
        self.scheduler_stats: SchedulerStats | None = None

    def check_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        context: RequestContext = NO_CONTEXT,
        *,
        fits_context: bool = False,
    ) -> EngineCoreRequest:
        """Returns the validated request for the core, not yet added; RequestError if it is invalid.
        ``fits_context``: see InputProcessor.process."""
        if self._sleeps:
            raise RequestError("The engine sleeps: call wake_up first.")
        arrival_time = self._clock.now()
        return self._inputs.process(
            request_id,
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
            sampling_params,
            arrival_time=arrival_time,
            context=context,
            fits_context=fits_context,
        )

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        context: RequestContext = NO_CONTEXT,
    ) -> None:
        request = self.check_request(request_id, prompt, sampling_params, context)
        self.add_checked(request, prompt if isinstance(prompt, str) else None)

    def add_checked(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """Adds a request that ``check_request`` returned."""
        for core_request in self._outputs.add_request(request, prompt):
            self._client.add_request(core_request)

    def step(self) -> list[RequestOutput]:
        """Waits for one message of the core and returns its outputs; EngineDeadError if the core
        has died."""
        try:
            message = self._client.get_output()
        except EngineDeadError as error:
            self._outputs.fail_all(error)
            raise
        processed = self._outputs.process_outputs(message.outputs, message.timestamp)
        if processed.stopped_ids:
            self._client.abort_requests(processed.stopped_ids, stopped=True)
        if processed.failed_ids:
            self._client.abort_requests(processed.failed_ids)
        self.iteration_stats = processed.iteration_stats
        self.scheduler_stats = message.scheduler_stats
        return processed.request_outputs

    @property
    def eos_token_ids(self) -> set[int]:
        """The tokens that end an answer of this model."""
        return self._inputs.eos_token_ids

    def abort_request(self, request_id: str) -> None:
        """Aborts all requests with this id; they have no further outputs."""
        self._client.abort_requests(self._outputs.abort_external(request_id))

    def abort_all(self) -> None:
        """Aborts all unfinished requests; does nothing if the core has died."""
        request_ids = self._outputs.abort_all()
        if request_ids:
            self._client.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self._outputs.num_unfinished > 0

    def reset_prefix_cache(self) -> bool:
        """Drops pins and evicts cached prefixes; False while requests hold blocks."""
        return self._utility("reset_prefix_cache", bool)

    def reset_encoder_cache(self) -> None:
        """Drops cached embeddings of pictures and clips that no request needs."""
        self._utility("reset_encoder_cache", type(None))

    def rest(self, method: str, *args: object) -> None:
        """Calls a utility that needs the engine at rest, which it is between calls; RequestError if it is
        refused."""
        try:
            self._utility("check_operation", type(None), method, *args)
            try:
                while not self._utility(method, bool, *args):
                    time.sleep(REST_POLL_S)
            finally:
                self._utility("stop_resting", type(None))
        except EngineGenerateError as error:
            raise RequestError(str(error)) from error

    def sleep(self, level: int) -> None:
        """Frees memory; no request is accepted before ``wake_up``."""
        self.rest("sleep", level)
        self._sleeps = True

    def wake_up(self) -> None:
        """Ends a sleep."""
        self._utility("wake_up", type(None))
        self._sleeps = False

    def load_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter; RequestError if it cannot be served."""
        try:
            self._utility("load_adapter", type(None), adapter.name, adapter.path, adapter.digest)
        except EngineGenerateError as error:
            raise RequestError(str(error), "lora_request") from error

    def unload_adapter(self, adapter: Adapter) -> None:
        """Drops an adapter once no request uses it."""
        self._utility("unload_adapter", type(None), adapter.key)

    def statistics(self) -> SchedulerStatistics:
        return self._utility("statistics", SchedulerStatistics)

    def check_invariants(self) -> None:
        """Raises if the core's blocks, requests and pins are inconsistent."""
        self._utility("check_invariants", type(None))

    def _utility(self, method: str, result_type: type[T], *args: Any) -> T:
        return msgspec.convert(self._client.call_utility(method, *args), result_type)

    def close(self) -> None:
        """Stops the core and frees the model. Repeatable."""
        self._client.close()
