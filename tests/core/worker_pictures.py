"""The encoder outputs of a worker that knows only what plans contain."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.records.messages import MediaSpan
from tests.core.kv_memory import Work


class WorkerPictures:
    """Tracks the outputs; fails on a plan that computes a picture's tokens without its output, or exceeds the
    cache."""

    def __init__(self, sizes: EncoderCacheManager) -> None:
        self._sizes = sizes
        self._media: dict[str, Sequence[MediaSpan]] = {}
        self._outputs: dict[str, int] = {}
        self.num_encoded = 0
        self.may_not_cut = False
        """Whether a step that begins before a picture must not end within it."""

    def take(self, work: Work) -> None:
        """Carries out the next plan."""
        plan = work.plan
        for request_id in plan.finished_req_ids:
            self._media.pop(request_id, None)
        self._media.update({new.req_id: new.media for new in plan.scheduled_new_reqs})
        for content_hash in plan.free_encoder_mm_hashes:
            self._outputs.pop(content_hash, None)
        self._encode([self._media[i][k] for i, ks in plan.scheduled_encoder_inputs.items() for k in ks])
        for span in work.spans:
            end = span.start + plan.num_scheduled_tokens[span.request.request_id]
            for picture in self._media[span.request.request_id]:
                if picture.offset < end and picture.end > span.start:
                    assert picture.content_hash in self._outputs, "a picture was not encoded"
                    is_cut = picture.offset > span.start and picture.end > end
                    assert not (is_cut and self.may_not_cut), "a picture was cut"

    def _encode(self, pictures: list[MediaSpan]) -> None:
        assert sum(picture.length for picture in pictures) <= self._sizes.step_size
        for picture in pictures:
            assert picture.content_hash not in self._outputs, "encoded twice"
            self._outputs[picture.content_hash] = picture.length
        assert sum(self._outputs.values()) <= self._sizes.cache_size
        self.num_encoded += len(pictures)


def pictures_of(prompt: list[int]) -> list[MediaSpan]:
    """Up to three pictures of a prompt; prompts share some, and one occurs twice."""
    ends = (2, 9 + len(prompt) % 3), (14, 18), (20 + len(prompt) % 5, 24 + len(prompt) % 5)
    contents = f"{prompt[0]}/{ends[0][1]}", "same", "same"
    return [
        MediaSpan(content, start, end - start)
        for content, (start, end) in zip(contents, ends, strict=True)
        if end <= len(prompt) and len(prompt) % 4
    ]
