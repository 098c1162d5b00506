"""Plans made by hand for the worker, with a block table for each KV cache group, and a runner for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.records.kv_cache_groups import KVCacheGroup
from engine.records.sampling_params import SamplingParams
from engine.worker.cpu.backend import CPUBackend
from engine.worker.cpu.compiled_decoder import CompiledDecoder, with_compiled_steps
from engine.worker.layer_groups import cache_spec
from engine.worker.loading.loader import load_model
from engine.worker.models.base import CausalModel
from engine.worker.parallel.group import ALONE
from engine.worker.step_runner import StepRunner

BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
Groups = Callable[[CausalModel], Sequence[KVCacheGroup]]


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_new: bool = True
    tables: list[list[int]] = field(default_factory=list)
    """Block tables by group; a null block replaces each block that its window has left."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


class HandPlans:
    """Takes requests and returns tokens. A block that a window has left goes to the next request that needs
    one, and holds NaN until it is written again."""

    def __init__(
        self,
        folder: Path,
        groups: Groups,
        *,
        attention: str = "auto",
        num_blocks: int = 64,
        max_model_len: int = 128,
        max_num_batched_tokens: int = 64,
    ) -> None:
        self.config = EngineConfig(
            model=ModelConfig(
                model=str(folder), device="cpu", max_model_len=max_model_len, attention_backend=attention
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens),
        )
        loaded = load_model(self.config.model)
        model = loaded.model
        self.groups = tuple(groups(model))
        spec = cache_spec(model, self.groups, loaded.dtype, BLOCK_SIZE)
        self.pool = spec.allocate(num_blocks, torch.device("cpu"))
        self.pool[1:] = torch.nan
        self._has_compiled_steps = False
        self._runner: StepRunner
        if attention == "triton":
            from engine.worker.gpu.backend import GPUBackend

            self._runner = GPUBackend(loaded, self.pool, spec.places, self.config, ALONE).runner(None)
        else:
            backend = CPUBackend(loaded, self.pool, spec.places, attention, self.config, ALONE)
            self._runner = backend.runner(None)
            compiled = with_compiled_steps(model, backend.attention)
            self._has_compiled_steps = isinstance(compiled, CompiledDecoder)
        self._free = deque(range(1, num_blocks))
        self._requests: dict[str, _Request] = {}
        self._finished: set[str] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def has_compiled_steps(self) -> bool:
        return self._has_compiled_steps

    def num_outputs(self, req_id: str) -> int:
        return len(self._requests[req_id].outputs)

    def add(self, req_id: str, prompt: list[int]) -> None:
        self._requests[req_id] = _Request(prompt, tables=[[] for _ in self.groups])

    def finish(self, req_id: str) -> list[int]:
        """Ends a request and returns its tokens."""
        request = self._requests.pop(req_id)
        for table in request.tables:
            self._give_back(table, len(table))
        self._finished.add(req_id)
        return request.outputs

    def step(self, num_tokens: dict[str, int]) -> None:
        """Computes at most this many tokens of each request, and no more than its prompt and outputs have."""
        counts = {
            req_id: min(count, self._requests[req_id].num_tokens - self._requests[req_id].num_computed)
            for req_id, count in num_tokens.items()
        }
        plan = self._plan(counts)
        output = self._runner.launch(plan).result()
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self._requests[req_id].outputs += tokens
        assert not output.failed

    def _plan(self, counts: dict[str, int]) -> SchedulerOutput:
        new, cached = [], CachedRequestData()
        for req_id, count in counts.items():
            request = self._requests[req_id]
            block_ids = self._allocate(request, count)
            if request.is_new:
                new.append(NewRequestData(req_id, request.prompt, GREEDY, block_ids, request.num_computed))
            else:
                cached.req_ids.append(req_id)
                cached.new_block_ids.append(block_ids)
                cached.num_computed_tokens.append(request.num_computed)
            request.is_new = False
            request.num_computed += count
        finished, self._finished = self._finished, set()
        return SchedulerOutput(new, cached, counts, sum(counts.values()), finished, set())

    def _allocate(self, request: _Request, count: int) -> list[int]:
        """Frees the blocks that windows and chunks have left; returns the new blocks, interleaved."""
        num_blocks = -(-(request.num_computed + count) // BLOCK_SIZE)
        for group, table in zip(self.groups, request.tables, strict=True):
            if group.sliding_window is not None:
                seen = max(0, request.num_computed - group.sliding_window + 1)
                self._give_back(table, seen // BLOCK_SIZE)
            if group.attention_chunk is not None:
                seen = request.num_computed // group.attention_chunk * group.attention_chunk
                self._give_back(table, seen // BLOCK_SIZE)
        news = []
        for _ in range(len(request.tables[0]), num_blocks):
            for table in request.tables:
                table.append(self._free.popleft())
                news.append(table[-1])
        return news

    def _give_back(self, table: list[int], end: int) -> None:
        blocks = [block for block in table[:end] if block]
        self.pool[blocks] = torch.nan
        self._free.extendleft(blocks)  # these blocks are used next
        table[:end] = [0] * end
