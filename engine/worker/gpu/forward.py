"""A model's pass over a step on the device: as a graph where one holds the step, call by call otherwise."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.attention.backend import AttentionBackend
from engine.worker.gpu.device_batch import DeviceBatch, DeviceStep, TokenArrays
from engine.worker.gpu.graph_sizes import GraphSizes
from engine.worker.gpu.step_batch import StepBatch
from engine.worker.gpu.streams import DeviceStreams, StepGraph
from engine.worker.models.base import CausalModel


class DeviceAttention(AttentionBackend, Protocol):
    """An AttentionBackend of steps that lie on the device. In each layer it has all K and V of a step in the
    pool before it reads any: a sequence may read what another one of its step brings, in any order."""

    def begin_device_step(self, batch: StepBatch) -> None:
        """Take a step as it is. Neither this nor ``attend`` makes the host wait, and for uniform steps both
        may be recorded in a graph."""


class Forward:
    """The logits of any step; nothing makes the host wait."""

    def __init__(
        self,
        model: CausalModel,
        attention: DeviceAttention,
        batch: DeviceBatch,
        sizes: GraphSizes,
        streams: DeviceStreams,
    ) -> None:
        self._model = model
        self._attention = attention
        self._batch = batch
        self._sizes = sizes
        self._streams = streams
        self.graphs: dict[int, StepGraph] = {}
        """By number of sequences."""
        num_tokens = sizes.largest * sizes.uniform_len
        self._all_tokens = torch.arange(num_tokens, device=batch.token_ids.device)
        self._logits = torch.empty(0)
        """[largest size * uniform_len, vocab_size]: of all tokens of a graph; shared by all graphs."""

    def logits(self, step: DeviceStep) -> torch.Tensor:
        """[num_samples, vocab_size], good until the next call."""
        size = step.arrays.graph_size
        graph = None if size is None else self.graphs.get(size)
        if graph is None:
            return self.run(step.arrays, step.sample_tokens)
        graph.replay()
        num_samples = len(step.sample_seqs)
        if num_samples == len(step.req_ids) and self._sizes.uniform_len == 1:
            return self._logits[:num_samples]  # the usual step: they need not be picked out
        return self._logits[step.sample_tokens]

    def run(self, arrays: TokenArrays, sample_tokens: torch.Tensor) -> torch.Tensor:
        """Call by call: [num_samples, vocab_size]; sample_tokens [num_samples] int64: whose logits."""
        self._attention.begin_device_step(arrays.batch)
        input_ids = self._batch.input_ids(arrays)
        return self._model.forward(input_ids, arrays.batch.positions, sample_tokens, self._attention)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record a graph of each size, the largest first: the others find room in the memory it has taken."""
        for size in reversed(self._sizes.sizes):
            self.graphs[size] = self._capture(size)

    def _capture(self, size: int) -> StepGraph:
        lengths = [self._sizes.uniform_len] * size
        arrays = self._batch.send_idle(lengths, lengths)
        tokens = self._all_tokens[: len(arrays.input_places)]
        if not len(self._logits):
            self._logits = torch.empty_like(self.run(arrays, tokens))
        logits = self._logits[: len(tokens)]
        graph = self._streams.new_graph()
        graph.capture(lambda: _keep(logits, self.run(arrays, tokens)))
        return graph


def _keep(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
