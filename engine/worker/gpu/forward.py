"""The forward pass of a step: replays a CUDA graph if one fits the step, otherwise runs eagerly."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from engine.core.outputs import PromptLogprobs
from engine.worker.attention.backend import AttentionBackend
from engine.worker.common_prefix import MIN_SEQS
from engine.worker.gpu.device_batch import DeviceBatch, DeviceStep, TokenArrays
from engine.worker.gpu.graph_sizes import GraphShape, GraphSizes
from engine.worker.gpu.step_batch import StepBatch
from engine.worker.gpu.streams import DeviceStreams, StepGraph
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.prompt_logprobs import prompt_logprobs


class DeviceAttention(AttentionBackend, Protocol):
    """An AttentionBackend for steps whose inputs are on the device. In each layer it writes all K and V of
    the step before it reads any: a sequence may read blocks that another sequence of the step writes."""

    def begin_device_step(self, batch: StepBatch) -> None:
        """Set the step that following calls belong to. Neither this nor ``attend`` synchronizes with the
        device, and for uniform steps both may be captured in a CUDA graph."""


class Forward:
    """Computes the logits of any step; nothing makes the host wait."""

    def __init__(
        self,
        model: CausalModel,
        attention: DeviceAttention,
        batch: DeviceBatch,
        sizes: GraphSizes,
        streams: DeviceStreams,
        decoder: Decoder | None = None,
    ) -> None:
        """``decoder``: the decoder whose layers the model runs; None: the model runs other code."""
        self._model = model
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._sizes = sizes
        self._streams = streams
        self.graphs: dict[GraphShape, StepGraph] = {}
        self.prefix_graphs: dict[GraphShape, StepGraph] = {}
        """Graphs of steps with a shared prefix."""
        self._all_tokens = torch.arange(sizes.most_tokens, device=batch.token_ids.device)
        self._logits = torch.empty(0)
        """[most tokens, vocab_size]: logits of all tokens of a graph; shared by all graphs."""

    def logits(self, step: DeviceStep) -> torch.Tensor:
        """Logits [num_samples, vocab_size], valid until the next call."""
        shape = step.arrays.graph
        graphs = self.graphs if step.arrays.batch.prefix is None else self.prefix_graphs
        graph = None if shape is None else graphs.get(shape)
        if graph is None:
            return self.run(step.arrays, step.sample_tokens)
        graph.replay()
        num_samples = len(step.sample_seqs)
        if num_samples == len(step.req_ids) and step.sampled_drafts is None:
            return self._logits[:num_samples]  # the usual step: no gather needed
        return self._logits[step.sample_tokens]

    def run(self, arrays: TokenArrays, sample_tokens: torch.Tensor) -> torch.Tensor:
        """Run eagerly: [num_samples, vocab_size]; sample_tokens [num_samples] int64: tokens with logits."""
        return self._run(self._model, arrays, sample_tokens)

    def _run(self, model: CausalModel, arrays: TokenArrays, sample_tokens: torch.Tensor) -> torch.Tensor:
        self._attention.begin_device_step(arrays.batch)
        input_ids = self._batch.input_ids(arrays)
        positions = arrays.batch.positions if arrays.axes is None else arrays.axes
        return model.forward(input_ids, positions, sample_tokens, self._attention)

    def told(self, step: DeviceStep) -> tuple[torch.Tensor, dict[str, PromptLogprobs]]:
        """Like ``logits``, with log-probabilities of the prompts of requests that want them. The host waits.

        A prompt's logits are never in memory all at once: the model returns the inputs of its head.
        """
        decoder = self._decoder
        num_samples = len(step.sample_tokens)
        assert decoder is not None, "others tell no prompts"
        rows = np.concatenate([each.tokens for each in step.prompts])
        all_rows = torch.cat((step.sample_tokens, torch.from_numpy(rows).to(step.sample_tokens.device)))
        decoder.is_headless = True
        try:
            hidden = self._run(decoder, step.arrays, all_rows)
        finally:
            decoder.is_headless = False
        head = decoder.logits_of_normed
        return head(hidden[:num_samples]), prompt_logprobs(hidden[num_samples:], step.prompts, head)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first: the others reuse its memory pool."""
        for shape in sorted(self._sizes.shapes(), key=lambda shape: shape.num_tokens, reverse=True):
            self.graphs[shape] = self._capture(shape)
            if self._batch.finds_prefixes and shape.num_seqs >= MIN_SEQS:
                self.prefix_graphs[shape] = self._capture(shape, has_prefix=True)

    def _capture(self, shape: GraphShape, *, has_prefix: bool = False) -> StepGraph:
        lengths = [shape.uniform_len] * shape.num_seqs
        arrays = self._batch.send_idle(lengths, lengths, shape.uniform_len, has_prefix=has_prefix)
        tokens = self._all_tokens[: shape.num_tokens]
        if not len(self._logits):
            self._logits = torch.empty_like(self.run(arrays, tokens))
        logits = self._logits[: len(tokens)]
        graph = self._streams.new_graph()
        graph.capture(lambda: _keep(logits, self.run(arrays, tokens)))
        return graph


def _keep(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
