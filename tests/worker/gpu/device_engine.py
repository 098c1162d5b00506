"""The real scheduler with a DeviceModelRunner on CPU tensors, with or without async scheduling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import FcfsPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.records.kv_cache_groups import groups_of
from engine.records.messages import TokenLogprobs
from engine.records.sampling_params import SamplingParams
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.layer_places import LayerPlaces
from engine.worker.gpu.device_batch import DeviceBatch
from engine.worker.gpu.device_runner import DeviceModelRunner, StepInFlight
from engine.worker.gpu.device_sampler import DeviceSampler
from engine.worker.gpu.forward import DeviceAttention, Forward
from engine.worker.gpu.fused_decoder import with_fused_steps
from engine.worker.gpu.graph_sizes import GraphShape, GraphSizes
from engine.worker.gpu.ops import select_ops
from engine.worker.gpu.streams import DeviceStreams, HostStreams, StepGraph
from engine.worker.gpu.torch_sampling import TorchSamplingOps
from engine.worker.gpu.triton_paged import TritonPagedAttention
from engine.worker.loading.loader import LoadedModel, load_model
from engine.worker.models.base import CausalModel
from tests.worker.gpu.step_attention import TorchStepAttention

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
EAGER = GraphSizes(())
DEVICE = torch.device("cpu")


class DeviceEngine:
    """Takes requests and returns tokens."""

    def __init__(
        self,
        folder: Path,
        *,
        steps_in_flight: int = 2,
        graph_sizes: GraphSizes = EAGER,
        num_blocks: int = 64,
        block_size: int = 8,
        max_model_len: int = 128,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        long_prefill_token_threshold: int = 0,
        streams: DeviceStreams | None = None,
        kernels: bool = False,
        pool_filled_with: float = 0.0,
        draft: Callable[[Request], list[int]] | None = None,
        prefix_groups: Sequence[int] = (),
    ) -> None:
        """``kernels``: Triton's, in its interpreter, instead of plain torch. ``draft``: proposes at most
        ``graph_sizes.verified_len`` - 1 next tokens of a request."""
        loaded = load_model(ModelConfig(model=str(folder), device="cpu", max_model_len=max_model_len))
        spec = spec_of(loaded, block_size)
        self.pool = spec.allocate(num_blocks, DEVICE).fill_(pool_filled_with)
        model, attention = (_fused if kernels else _plain)(loaded, self.pool, spec.places)
        streams = streams or HostStreams()
        self.sampler = sampler = DeviceSampler(0, loaded.vocab_size, TorchSamplingOps(), streams)
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            async_scheduling=steps_in_flight > 1,
        )
        sizes = max_model_len, block_size, graph_sizes
        num_groups = len(spec.groups)
        self.batch = DeviceBatch(
            limits, *sizes, sampler, DEVICE, streams, num_groups, prefix_groups=prefix_groups
        )
        self.forward = Forward(model, attention, self.batch, graph_sizes, streams)
        self.forward.capture()
        self.runner = DeviceModelRunner(self.forward, self.batch, sampler, streams)
        self.scheduler = _scheduler(limits, block_size, num_blocks, max_model_len, spec)
        self.requests: dict[str, Request] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.num_steps = 0
        """The number of steps with tokens."""
        self.num_drafts = self.num_accepted = 0
        self._draft = draft
        self.num_chunked_steps = 0
        self._steps_in_flight = steps_in_flight
        self._launched: deque[tuple[SchedulerOutput, StepInFlight]] = deque()

    def add(self, request_id: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        hasher = self.scheduler.request_block_hasher
        request = Request(request_id, prompt, params, 0.0, block_hasher=hasher)
        self.requests[request_id] = request
        self.scheduler.add_request(request, 0.0)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED, 0.0)

    def step(self) -> None:
        """Launches as many steps as may be in flight, then takes the result of the oldest."""
        while len(self._launched) < self._steps_in_flight:
            if self._propose():
                break
            plan = self.scheduler.schedule(0.0)
            self._launched.append((plan, self.runner.launch(plan)))
            if plan.scheduled_spec_decode_tokens:
                break  # no step is planned after it before its output is known
        plan, in_flight = self._launched.popleft()
        output = in_flight.result()
        self.num_steps += bool(output.req_ids)
        self.num_chunked_steps += sum(
            not tokens and plan.num_scheduled_tokens[req_id] > 1
            for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)
        )
        self._count_drafts(plan, output)
        for told in self.scheduler.update_from_output(plan, output, 0.0):
            self.logprobs.setdefault(told.request_id, []).extend(told.new_logprobs or ())

    def _propose(self) -> bool:
        """Proposes drafts for the next plan. As in the core, it returns True, to wait, if a step is under way
        and drafts are likely."""
        if self._draft is None:
            return False
        proposals = {request.request_id: self._draft(request) for request in self.scheduler.running}
        known = {request_id: drafts for request_id, drafts in proposals.items() if drafts}
        if self._launched:
            return bool(known)
        self.scheduler.update_draft_token_ids(known, 0.0)
        return False

    def _count_drafts(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            self.num_drafts += len(drafts)
            self.num_accepted += len(sampled[request_id]) - 1

    def run(self, max_steps: int = 2000) -> dict[str, list[int]]:
        """Runs until no request is left and none is in flight; returns the output tokens of every request."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                for _ in range(self._steps_in_flight):
                    self.step()
                return {name: request.output_token_ids for name, request in self.requests.items()}
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def run_all(
        self, prompts: Mapping[str, list[int]], params: Callable[[int], SamplingParams]
    ) -> dict[str, list[int]]:
        """Adds one request per step, and runs all."""
        for index, (request_id, prompt) in enumerate(prompts.items()):
            self.add(request_id, prompt, params(index))
            self.step()
        return self.run()

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(request.num_cached_tokens or 0 for request in self.requests.values())


def spec_of(loaded: LoadedModel, block_size: int) -> KvCacheSpec:
    model = loaded.model
    return KvCacheSpec(
        groups_of(model.windows),
        model.num_kv_heads,
        model.head_dim,
        loaded.dtype,
        block_size,
        model.num_kv_vectors,
    )


def _plain(
    loaded: LoadedModel, pool: torch.Tensor, places: LayerPlaces
) -> tuple[CausalModel, DeviceAttention]:
    return loaded.model, TorchStepAttention(pool, places)


def _fused(
    loaded: LoadedModel, pool: torch.Tensor, places: LayerPlaces
) -> tuple[CausalModel, DeviceAttention]:
    attention = TritonPagedAttention(pool, places=places)
    return with_fused_steps(loaded.model, attention, select_ops(DEVICE), loaded.max_model_len), attention


def _scheduler(
    limits: SchedulerConfig, block_size: int, num_blocks: int, max_model_len: int, spec: KvCacheSpec
) -> Scheduler:
    return Scheduler(
        limits,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        policy=FcfsPolicy(),
        kv_cache_groups=spec.groups,
    )


def count_replays(engine: DeviceEngine) -> list[GraphShape]:
    """Records the shapes of the graphs that are replayed from now on."""
    return _counted(engine.forward.graphs)


def count_prefix_replays(engine: DeviceEngine) -> list[GraphShape]:
    """Like ``count_replays``, for steps with a shared prefix."""
    return _counted(engine.forward.prefix_graphs)


def _counted(graphs: dict[GraphShape, StepGraph]) -> list[GraphShape]:
    replayed: list[GraphShape] = []
    for shape, graph in graphs.items():
        graphs[shape] = CountedGraph(graph, shape, replayed)
    return replayed


@dataclass(frozen=True, slots=True)
class CountedGraph:
    """A StepGraph that was captured before."""

    graph: StepGraph
    shape: GraphShape
    replayed: list[GraphShape]

    def capture(self, run: Callable[[], None]) -> None:
        raise AssertionError("it was captured before")

    def replay(self) -> None:
        self.replayed.append(self.shape)
        self.graph.replay()
