"""The pictures of a worker's requests: reads their pixels, encodes them, and places them in steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.core.outputs import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.records.messages import MediaSpan
from engine.records.row_failures import PICTURE_LOST
from engine.worker.attention.backend import IntArray
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.placed_pictures import PlacedPictures
from engine.worker.models.rotary import have_axes
from engine.worker.pictures.positions import rope_positions
from engine.worker.pictures.tower import Picture, VisionTower

logger = logging.getLogger(__name__)


def _no_positions() -> IntArray:
    """No positions, for a model whose tokens have one position each, their index."""
    return np.empty((3, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request's pictures, and the positions of its tokens: see ``rope_positions``."""

    media: Sequence[MediaSpan]
    positions: IntArray = field(default_factory=_no_positions)
    lead: int = 0


class StepTokens(Protocol):
    """The fields of a step that this module reads: its sequences, in the order of its tokens."""

    @property
    def req_ids(self) -> list[str]: ...
    @property
    def query_lens(self) -> IntArray: ...
    @property
    def seq_lens(self) -> IntArray: ...
    @property
    def positions(self) -> IntArray: ...


class StepPictures:
    """Encodes the pictures of plans, and puts the outputs in place of tokens' embeddings."""

    def __init__(self, tower: VisionTower, decoder: Decoder) -> None:
        self._tower: VisionTower | None = tower
        self._decoder: Decoder | None = decoder
        self._has_axes = have_axes(decoder.ropes.values())
        self._prompts: dict[str, _Prompt] = {}
        self._outputs: dict[str, torch.Tensor | None] = {}
        """The encoder's outputs by content hash; None if the pixels could not be read."""
        self._lost: set[str] = set()
        """Requests of this step with a picture that could not be read."""

    def use(self, tower: VisionTower | None, decoder: CausalModel | None) -> None:
        """Continue with another tower and its decoder, of the same kind; None: no step runs before the next
        call. Encoded pictures are dropped, as the scheduler drops them."""
        assert decoder is None or isinstance(decoder, Decoder), "load_tower() refuses others"
        self._outputs.clear()
        self._tower = tower
        self._decoder = decoder

    @property
    def _encoder(self) -> VisionTower:
        assert self._tower is not None, "it sleeps"
        return self._tower

    @property
    def _model(self) -> Decoder:
        assert self._decoder is not None, "it sleeps"
        return self._decoder

    def begin_step(self, plan: SchedulerOutput, step: StepTokens) -> IntArray:
        """Encode new pictures and place those that the step computes; the decoder reads them until
        ``end_step``. Call ``update`` first. Returns the positions of the step's tokens: [num_tokens], or [3,
        num_tokens] if any belongs to a picture and the model's tokens have three positions."""
        self._encode(plan)
        if not self._prompts.keys().isdisjoint(step.req_ids):
            self._place(step)
        return self.positions_of(step)

    def positions_of(self, step: StepTokens) -> IntArray:
        """Positions of a step with other, unsampled and unkept, tokens. Call it after ``begin_step``."""
        if not self._has_axes or self._prompts.keys().isdisjoint(step.req_ids):
            return step.positions
        positions = np.broadcast_to(step.positions, (3, len(step.positions))).copy()
        for req_id, start, end, shift in _sequences(step):
            prompt = self._prompts.get(req_id)
            if prompt is None:
                continue
            known = prompt.positions[:, start:end]
            behind = start + shift + known.shape[1]
            positions[:, start + shift : behind] = known
            positions[:, behind : end + shift] += prompt.lead
        return positions if self.are_placed else np.ascontiguousarray(positions[0])

    @property
    def are_placed(self) -> bool:
        """Whether the step has tokens of pictures."""
        return self._model.pictures is not None

    def end_step(self) -> frozenset[str]:
        """Finish the step. Returns the requests whose pictures are lost: see ``without``."""
        self._model.pictures = None
        lost = frozenset(self._lost)
        self._lost = set()
        return lost

    def warm_up(self) -> None:
        """Encode the largest picture once, so that the KV pool leaves that much of the device's memory."""
        side = max(1, math.isqrt(self._encoder.model.max_pixels) // self._encoder.model.factor)
        size = side * self._encoder.model.factor
        self._encoder.encode([np.zeros((size, size, 3), dtype=np.uint8)])

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the deltas of a plan, with or without tokens."""
        for content_hash in plan.free_encoder_mm_hashes:
            self._outputs.pop(content_hash, None)
        for req_id in plan.finished_req_ids:
            self._prompts.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            if new.media:
                self._prompts[new.req_id] = self._prompt(new)

    def _prompt(self, new: NewRequestData) -> _Prompt:
        if not self._has_axes:
            return _Prompt(new.media)
        factor = self._encoder.model.factor
        return _Prompt(new.media, *rope_positions(len(new.prompt_token_ids), new.media, factor))

    def _encode(self, plan: SchedulerOutput) -> None:
        found: dict[str, Picture] = {}
        for req_id, indices in plan.scheduled_encoder_inputs.items():
            for span in (self._prompts[req_id].media[index] for index in indices):
                picture = _read(span)
                picture = self._read_elsewhere(span) if picture is None else picture
                if picture is None:
                    self._outputs[span.content_hash] = None
                else:
                    found[span.content_hash] = picture
        if found:
            outputs = self._encoder.encode(list(found.values()))
            self._outputs |= dict(zip(found, outputs, strict=True))

    def _read_elsewhere(self, lost: MediaSpan) -> Picture | None:
        """The same picture from another request: one that was just aborted has removed its file."""
        spans = chain.from_iterable(prompt.media for prompt in self._prompts.values())
        others = (span for span in spans if span.content_hash == lost.content_hash and span != lost)
        return next((picture for span in others if (picture := _read(span)) is not None), None)

    def _place(self, step: StepTokens) -> None:
        rows = list[IntArray]()
        parts = list[torch.Tensor]()
        for req_id, start, end, shift in _sequences(step):
            prompt = self._prompts.get(req_id)
            for span in () if prompt is None else prompt.media:
                if span.end <= start or span.offset >= end:
                    continue
                output = self._outputs[span.content_hash]
                if output is None:
                    self._lost.add(req_id)
                    continue
                tokens = self._embedded(span)
                first, beyond = np.searchsorted(tokens, (start, end))
                rows.append(tokens[first:beyond] + shift)
                parts.append(output[first:beyond])
        if rows:
            places = torch.from_numpy(np.concatenate(rows)).to(parts[0].device)
            self._model.pictures = PlacedPictures(places, torch.cat(parts))

    def _embedded(self, span: MediaSpan) -> IntArray:
        """The tokens of the prompt that a picture's embeddings replace, without those at the ends of rows."""
        tokens = np.arange(span.offset, span.end)
        if self._encoder.model.row_end_id is None:
            return tokens
        assert span.pixels is not None, "the core has checked it"
        columns = span.pixels.width // self._encoder.model.factor
        embedded: IntArray = tokens[np.arange(span.length) % (columns + 1) != columns]
        return embedded


def _sequences(step: StepTokens) -> Iterator[tuple[str, int, int, int]]:
    """Yields each sequence's request, the start and end of its computed tokens, and the difference between
    their places in the step and in the sequence."""
    ends = step.seq_lens.tolist()
    lens = step.query_lens.tolist()
    last = 0
    for req_id, end, count in zip(step.req_ids, ends, lens, strict=True):
        last += count
        yield req_id, end - count, end, last - end


def without(lost: frozenset[str], result: ModelRunnerOutput) -> ModelRunnerOutput:
    """The result of a step, with the requests whose pictures are lost marked as failed."""
    if lost:
        for index, req_id in enumerate(result.req_ids):
            if req_id in lost:
                result.sampled_token_ids[index] = result.sampled_token_ids[index] or [0]
        result.failed = {**result.failed, **dict.fromkeys(lost, PICTURE_LOST)}
    return result


def _read(span: MediaSpan) -> Picture | None:
    """The pixels of a picture; None if the file is missing or has another size."""
    pixels = span.pixels
    assert pixels is not None, "the core has checked it"
    try:
        read = np.fromfile(pixels.path, dtype=np.uint8)
        return read.reshape(pixels.height, pixels.width, 3)
    except (OSError, ValueError) as error:
        logger.warning("The pixels of a picture are lost: %s", error)
        return None
