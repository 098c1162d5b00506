"""The pictures of a worker's requests, from their pixels to their places in a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.messages import MediaSpan
from engine.row_failures import PICTURE_LOST
from engine.worker.attention.backend import IntArray
from engine.worker.cpu.input_batch import StepInputs
from engine.worker.models.decoder import Decoder
from engine.worker.models.placed_pictures import PlacedPictures
from engine.worker.models.rotary import have_axes
from engine.worker.pictures.positions import rope_positions
from engine.worker.pictures.tower import Picture, VisionTower

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request's pictures, and the positions of its tokens: see ``rope_positions``."""

    media: Sequence[MediaSpan]
    positions: IntArray | None
    """None for a model whose tokens have one position each."""
    shift: int


class StepPictures:
    """Encodes what plans say, and puts it in the places of tokens."""

    def __init__(self, tower: VisionTower, decoder: Decoder) -> None:
        self._tower = tower
        self._decoder = decoder
        self._has_axes = have_axes(decoder.ropes.values())
        self._prompts: dict[str, _Prompt] = {}
        self._outputs: dict[str, torch.Tensor | None] = {}
        """The encoder's outputs by content hash; None where the pixels could not be read."""
        self._lost: set[str] = set()
        """Requests of this step with such a picture."""

    def begin_step(self, plan: SchedulerOutput, step: StepInputs) -> IntArray:
        """Encode what is new and place what the step computes, after ``update``; until ``end_step`` the
        decoder reads it. Returns the positions of the step's tokens: [num_tokens], or [3, num_tokens] if any
        is a picture's."""
        self._lost = set()
        self._encode(plan)
        if self._prompts.keys().isdisjoint(step.req_ids):
            return step.positions
        return self._place(step)

    def end_step(self, result: ModelRunnerOutput) -> None:
        """End the requests whose pictures are lost."""
        self._decoder.pictures = None
        for index, req_id in enumerate(result.req_ids):
            if req_id in self._lost:
                result.sampled_token_ids[index] = result.sampled_token_ids[index] or [0]
                result.failed = {**result.failed, req_id: PICTURE_LOST}

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the deltas of a plan, whether it has tokens or none."""
        for content_hash in plan.free_encoder_mm_hashes:
            self._outputs.pop(content_hash, None)
        for req_id in plan.finished_req_ids:
            self._prompts.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            if new.media:
                self._prompts[new.req_id] = self._prompt(len(new.prompt_token_ids), new.media)

    def _prompt(self, num_tokens: int, media: Sequence[MediaSpan]) -> _Prompt:
        if not self._has_axes:
            return _Prompt(media, None, 0)
        return _Prompt(media, *rope_positions(num_tokens, media, self._tower.model.factor))

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
            outputs = self._tower.encode(list(found.values()))
            self._outputs |= dict(zip(found, outputs, strict=True))

    def _read_elsewhere(self, lost: MediaSpan) -> Picture | None:
        """The same picture of another request: one that was just aborted has taken its file along."""
        spans = chain.from_iterable(prompt.media for prompt in self._prompts.values())
        others = (span for span in spans if span.content_hash == lost.content_hash and span != lost)
        return next((picture for span in others if (picture := _read(span)) is not None), None)

    def _place(self, step: StepInputs) -> IntArray:
        positions = np.broadcast_to(step.positions, (3, len(step.positions))).copy()
        rows, parts = list[IntArray](), list[torch.Tensor]()
        ends = np.cumsum(step.attention.query_lens)
        for seq, req_id in enumerate(step.req_ids):
            prompt = self._prompts.get(req_id)
            if prompt is None:
                continue
            end, count = int(step.attention.seq_lens[seq]), int(step.attention.query_lens[seq])
            last, start = int(ends[seq]), end - count
            if prompt.positions is not None:
                known = prompt.positions[:, start:end]
                behind = last - count + known.shape[1]
                positions[:, last - count : behind] = known
                positions[:, behind:last] += prompt.shift
            for span in prompt.media:
                if span.end <= start or span.offset >= end:
                    continue
                output = self._outputs[span.content_hash]
                if output is None:
                    self._lost.add(req_id)
                    continue
                tokens = self._embedded(span)
                first, beyond = np.searchsorted(tokens, (start, end))
                rows.append(tokens[first:beyond] + (last - end))
                parts.append(output[first:beyond])
        if not rows:
            return np.ascontiguousarray(positions[0])
        places = torch.from_numpy(np.concatenate(rows)).to(parts[0].device)
        self._decoder.pictures = PlacedPictures(places, torch.cat(parts))
        return positions if self._has_axes else step.positions

    def _embedded(self, span: MediaSpan) -> IntArray:
        """The tokens of the prompt in whose places the embeddings of a picture go, not those behind rows."""
        tokens = np.arange(span.offset, span.end)
        if self._tower.model.row_end_id is None:
            return tokens
        assert span.pixels is not None, "the core has checked it"
        columns = span.pixels.width // self._tower.model.factor
        embedded: IntArray = tokens[np.arange(span.length) % (columns + 1) != columns]
        return embedded


def _read(span: MediaSpan) -> Picture | None:
    """The pixels of a picture; None if they are not as announced."""
    pixels = span.pixels
    assert pixels is not None, "the core has checked it"
    try:
        read = np.fromfile(pixels.path, dtype=np.uint8)
        return read.reshape(pixels.height, pixels.width, 3)
    except (OSError, ValueError) as error:
        logger.warning("The pixels of a picture are lost: %s", error)
        return None
