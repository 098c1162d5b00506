"""One copy a step: its memory is unchanged while it may be read, and arrays are where graphs read them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.records.sampling_params import SamplingParams
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.staging import Staging, words_of
from engine.worker.gpu.streams import HostStreams, Mark
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.gpu.device_engine import DeviceEngine

DEVICE = torch.device("cpu")


@dataclass(slots=True)
class _Queued:
    """Copies that a slow device has not yet made."""

    read: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Host memory, and its content when it was sent."""
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Host memory, and its later content."""

    @torch.inference_mode()
    def finish(self) -> None:
        for source, sent in self.read:
            assert torch.equal(source, sent), "overwritten while the device read it"
        for target, value in self.arriving:
            target.copy_(value)


class SlowStreams(HostStreams):
    """A device that works only when it is waited for: it reads late, and its results are garbage before."""

    def __init__(self) -> None:
        self._queue: deque[_Queued] = deque()
        self._open = _Queued()
        self.num_sent = 0

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        super().send(source, target)
        self._open.read.append((source, source.clone()))
        self.num_sent += 1

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(source, -1)
        self._open.arriving.append((target, source.clone()))
        return target

    def mark(self) -> Mark:
        queued, self._open = self._open, _Queued()
        self._queue.append(queued)
        return _SlowMark(self._queue, queued)


@dataclass(frozen=True, slots=True)
class _SlowMark:
    queue: deque[_Queued]
    last: _Queued

    def synchronize(self) -> None:
        while any(queued is self.last for queued in self.queue):
            self.queue.popleft().finish()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_nothing_is_overwritten_or_read_too_early(steps_in_flight: int, model_folders: ModelFolders) -> None:
    """With a device that copies as late as possible, every token is right; each step makes one copy."""
    folder, streams = model_folders("qwen3"), SlowStreams()
    engine = DeviceEngine(
        folder,
        steps_in_flight=steps_in_flight,
        graph_sizes=GraphSizes((4,)),
        streams=streams,
        num_blocks=24,
        max_num_batched_tokens=24,
    )
    num_before = streams.num_sent
    prompts = {f"r{i}": random_tokens(9 + 4 * i, seed=i) for i in range(5)}
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = engine.run_all(prompts, lambda _: greedy)
    assert streams.num_sent - num_before == engine.num_steps
    reference = Reference(folder)
    for request_id, prompt in prompts.items():
        assert outputs[request_id] == reference.greedy(prompt, 20)
        assert [entry.token_ids[0] for entry in engine.logprobs[request_id]] == outputs[request_id]


def test_a_buffer_is_written_again_only_when_its_copy_is_made() -> None:
    """A buffer is not written again before its copy, even if no one waits, for any number of steps."""
    streams = SlowStreams()
    staging = Staging(words_of((4, 4)), DEVICE, streams)
    for step in range(6):
        staging.begin()
        staging.put([step] * 4, np.int32)
        staging.send()
    streams.mark().synchronize()


def test_arrays_of_equal_lengths_lie_at_the_same_place() -> None:
    """A step's first array has a fixed address, whatever follows; each starts at a multiple of 16 bytes."""
    staging = Staging(words_of((3, 4), (5, 8), (9, 4)), DEVICE, HostStreams())
    addresses = set()
    for step in range(4):
        staging.begin()
        first, second = staging.put([step] * 3, np.int32), staging.put([-step] * 5, np.int64)
        third = staging.put([0.5] * (1 + step), np.float32)
        staging.send()
        assert first.tolist() == [step] * 3
        assert second.tolist() == [-step] * 5
        assert third.tolist() == [0.5] * (1 + step)
        addresses.add((first.data_ptr(), second.data_ptr(), third.data_ptr()))
    assert len(addresses) == 1
    assert all(address % 16 == 0 for address in addresses.pop())


def test_sizes_of_graphs() -> None:
    """Small sizes come one by one, then in coarser steps, then the limit; the smallest that fits is used."""
    sizes = GraphSizes.up_to(100)
    assert sizes.sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes.sizes[-1] == sizes.largest == 100
    assert [sizes.smallest(n) for n in (1, 3, 9, 97)] == [(1, 1), (4, 1), (16, 1), (100, 1)]
    assert sizes.smallest(101) is None
    assert sizes.smallest(1, uniform_len=3) is None
    assert GraphSizes.up_to(3).sizes == (1, 2, 3)
    assert GraphSizes.up_to(1).sizes == (1,)
    assert len(GraphSizes.up_to(256).sizes) <= 35
    assert GraphSizes(()).smallest(1) is None


def test_graphs_that_verify_drafts() -> None:
    """Without drafts there are none; with drafts they are added, as many as the tokens allow."""
    assert list(GraphSizes.up_to(4).shapes()) == [(1, 1), (2, 1), (4, 1)]
    sizes = GraphSizes.up_to(8, verified_len=5, max_tokens=20)
    assert list(sizes.shapes()) == [(1, 1), (2, 1), (4, 1), (8, 1), (1, 5), (2, 5), (4, 5)]
    assert [sizes.smallest(n, 5) for n in (1, 3, 5)] == [(1, 5), (4, 5), None]
    assert sizes.smallest(5) == (8, 1)
    assert sizes.most_tokens == 20
    assert GraphSizes((), verified_len=5).most_tokens == 0
