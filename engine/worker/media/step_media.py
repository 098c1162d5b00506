"""The pictures and clips of a worker's requests: reads, encodes, and places them in steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.core.outputs import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.records.media import PictureSize
from engine.records.messages import MediaSpan
from engine.records.row_failures import MEDIA_LOST
from engine.worker.attention.backend import IntArray
from engine.worker.media.positions import rope_positions
from engine.worker.media.towers import Medium, Towers, read_file
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.placed_media import PlacedMedia
from engine.worker.models.rotary import have_axes

logger = logging.getLogger(__name__)


def _no_positions() -> IntArray:
    """No positions, for a model whose tokens have one position each, their index."""
    return np.empty((3, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request's pictures and clips, and the positions of its tokens: see ``rope_positions``."""

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


class StepMedia:
    """Encodes the pictures and clips of plans, and puts the outputs in place of tokens' embeddings."""

    def __init__(self, towers: Towers, decoder: Decoder) -> None:
        self._towers: Towers | None = towers
        self._decoder: Decoder | None = decoder
        self._has_axes = have_axes(decoder.ropes.values())
        self._prompts: dict[str, _Prompt] = {}
        self._outputs: dict[str, torch.Tensor | None] = {}
        """The encoders' outputs by content hash; None if the file could not be read."""
        self._lost: set[str] = set()
        """Requests of this step with a picture or clip that could not be read."""

    def use(self, towers: Towers | None, decoder: CausalModel | None) -> None:
        """Continue with other towers and their decoder, of the same kind; None: no step runs before the next
        call. Outputs are dropped, as the scheduler drops them."""
        assert decoder is None or isinstance(decoder, Decoder), "load_towers() refuses others"
        self._outputs.clear()
        self._towers = towers
        self._decoder = decoder

    @property
    def _encoders(self) -> Towers:
        assert self._towers is not None, "it sleeps"
        return self._towers

    @property
    def _model(self) -> Decoder:
        assert self._decoder is not None, "it sleeps"
        return self._decoder

    def begin_step(self, plan: SchedulerOutput, step: StepTokens) -> IntArray:
        """Encode new media and place what the step computes of them; the decoder reads them until
        ``end_step``. Call ``update`` first. Returns the positions of the step's tokens: [num_tokens], or [3,
        num_tokens] if any belongs to media and the model's tokens have three positions."""
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
        """Whether the step has tokens of pictures or clips."""
        return self._model.media is not None

    def end_step(self) -> frozenset[str]:
        """Finish the step. Returns the requests whose media are lost: see ``without``."""
        self._model.media = None
        lost = frozenset(self._lost)
        self._lost = set()
        return lost

    def warm_up(self) -> None:
        """See ``Towers.warm_up``."""
        self._encoders.warm_up()

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
        vision = self._encoders.vision
        factor = 1 if vision is None else vision.model.factor
        return _Prompt(new.media, *rope_positions(len(new.prompt_token_ids), new.media, factor))

    def _encode(self, plan: SchedulerOutput) -> None:
        found: dict[str, Medium] = {}
        for req_id, indices in plan.scheduled_encoder_inputs.items():
            for span in (self._prompts[req_id].media[index] for index in indices):
                medium = _read(span)
                medium = self._read_elsewhere(span) if medium is None else medium
                if medium is None:
                    self._outputs[span.content_hash] = None
                else:
                    found[span.content_hash] = medium
        if found:
            outputs = self._encoders.encode(list(found.values()))
            self._outputs |= dict(zip(found, outputs, strict=True))

    def _read_elsewhere(self, lost: MediaSpan) -> Medium | None:
        """The same picture or clip from another request: one that was just aborted has removed its file."""
        spans = chain.from_iterable(prompt.media for prompt in self._prompts.values())
        others = (span for span in spans if span.content_hash == lost.content_hash and span != lost)
        return next((medium for span in others if (medium := _read(span)) is not None), None)

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
            self._model.media = PlacedMedia(places, _of_one_width(parts))

    def _embedded(self, span: MediaSpan) -> IntArray:
        """The tokens of the prompt that embeddings replace: not those at the ends of a picture's rows."""
        tokens = np.arange(span.offset, span.end)
        vision = self._encoders.vision
        if not isinstance(span.size, PictureSize) or vision is None or vision.model.row_end_id is None:
            return tokens
        columns = span.size.width // vision.model.factor
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
    """The result of a step, with the requests whose media are lost marked as failed."""
    if lost:
        for index, req_id in enumerate(result.req_ids):
            if req_id in lost:
                result.sampled_token_ids[index] = result.sampled_token_ids[index] or [0]
        result.failed = {**result.failed, **dict.fromkeys(lost, MEDIA_LOST)}
    return result


def _of_one_width(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join outputs; those without additions to the outputs of layers get zeros there."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def _read(span: MediaSpan) -> Medium | None:
    """The pixels or samples; None if the file is missing or has another size."""
    assert span.size is not None, "the core has checked it"
    try:
        return read_file(span.path, span.size)
    except (OSError, ValueError) as error:
        logger.warning("The file of a %s is lost: %s", span.size.kind.noun, error)
        return None
