"""Rows on the device, built from deltas and from tokens unknown to the host, equal the scheduler's state."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request
from engine.worker.gpu.device_batch import DeviceBatch, DeviceStep
from engine.worker.gpu.device_sampler import DeviceSampler
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.streams import HostStreams
from engine.worker.gpu.torch_sampling import TorchSamplingOps
from tests.worker.shadow import (
    ACTIONS,
    BLOCK_SIZE,
    LIMITS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Action,
    SchedulerShadow,
)


def sampled_token(req_id: str, position: int) -> int:
    """The made-up token at a place of a request."""
    return (31 * int(req_id[1:]) + 7 * position) % VOCAB_SIZE


class Shadow(SchedulerShadow):
    """Rows on the device, with up to two plans sent before a result is returned."""

    def __init__(self, graph_sizes: GraphSizes) -> None:
        limits = replace(LIMITS, async_scheduling=True)
        super().__init__(limits)
        streams = HostStreams()
        sampler = DeviceSampler(0, VOCAB_SIZE, TorchSamplingOps(), streams)
        device = torch.device("cpu")
        self.batch = DeviceBatch(limits, MAX_MODEL_LEN, BLOCK_SIZE, graph_sizes, sampler, device, streams)
        self._sent: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def step(self) -> None:
        while len(self._sent) < 2:
            plan = self.scheduler.schedule(0.0)
            self.num_preemptions += len(plan.preempted_req_ids)
            step = self.batch.send(plan)
            self._sent.append((plan, self._run(plan, step)))
        plan, output = self._sent.popleft()
        self.scheduler.update_from_output(plan, output, 0.0)

    def _run(self, plan: SchedulerOutput, step: DeviceStep | None) -> ModelRunnerOutput:
        if step is None:
            return ModelRunnerOutput([], [])
        self._check(plan, step)
        sampled: list[list[int]] = [[] for _ in step.req_ids]
        for seq in step.sample_seqs.tolist():
            req_id = step.req_ids[seq]
            sampled[seq] = [sampled_token(req_id, self.scheduler.requests[req_id].num_computed_tokens)]
        tokens = [token for tokens in sampled for token in tokens]
        self.batch.store_sampled(step, torch.tensor(tokens, dtype=torch.int64))
        return ModelRunnerOutput(step.req_ids, sampled)

    def _check(self, plan: SchedulerOutput, step: DeviceStep) -> None:
        """Compares every array with the scheduler's own requests and block tables."""
        batch, start = step.arrays.batch, 0
        input_ids = self.batch.input_ids(step.arrays).tolist()
        ready = []
        for seq, req_id in enumerate(step.req_ids):
            request, count = self.scheduler.requests[req_id], plan.num_scheduled_tokens[req_id]
            end = request.num_computed_tokens  # the plan's tokens already count as computed
            positions = list(range(end - count, end))
            part = slice(start, start + count)
            assert batch.query_starts[seq : seq + 2].tolist() == [start, start + count]
            start += count
            assert batch.seq_lens[seq] == end
            assert batch.positions[part].tolist() == positions
            assert input_ids[part] == [self._token(request, position) for position in positions]
            blocks = self.scheduler.kv.block_ids(req_id)[: -(-end // BLOCK_SIZE)]
            assert batch.block_tables[batch.rows[seq], : len(blocks)].tolist() == blocks
            slots = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
            assert batch.slots[part].tolist() == slots
            if self.scheduler.steps.samples(plan, request):
                ready.append((seq, start - 1))
        assert list(zip(step.sample_seqs.tolist(), step.sample_tokens.tolist(), strict=True)) == ready
        assert not batch.seq_lens[len(step.req_ids) :].any(), "places that nobody took"
        assert (batch.slots[start:] == -1).all()

    def _token(self, request: Request, position: int) -> int:
        prompt = request.prompt_token_ids
        return prompt[position] if position < len(prompt) else sampled_token(request.request_id, position)


SIZES = pytest.mark.parametrize("graph_sizes", [GraphSizes(()), GraphSizes((3, 4))], ids=["as-is", "padded"])


@pytest.mark.slow
@SIZES
@settings(deadline=None)
@given(actions=ACTIONS)
def test_rows_follow_the_scheduler(graph_sizes: GraphSizes, actions: list[Action]) -> None:
    """Through adds, aborts, chunks, hits and preemptions, a step ahead, rows are right; none leaks."""
    shadow = Shadow(graph_sizes)
    shadow.play(actions)
    assert len(shadow.batch) == 0


def test_preemption_is_part_of_it() -> None:
    """The pool is small enough that requests lose their rows and get them back."""
    shadow = Shadow(GraphSizes(()))
    shadow.crowd()
