"""Placeholders of pictures and clips in prompts: a part or a text for the chat template, which is then
expanded to as many tokens as the model's encoder makes embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.errors import RequestError
from engine.media.store import StoredMedia
from engine.records.media import AudioModel, MediaKind, MediaModel, MediaModels, PictureModel
from engine.records.messages import MediaSpan
from engine.tokenization.media_parts import with_media_texts
from engine.tokenization.parted_text import PartedText
from engine.tokenization.tokenizer import Tokenizer

Message = dict[str, Any]

_AROUND = {
    MediaKind.IMAGE: (("<|vision_start|>", "<|vision_end|>"), ("<|vision_bos|>", "<|vision_eos|>")),
    MediaKind.AUDIO: (
        ("<|audio_bos|>", "<|audio_eos|>"),
        ("<|audio_start|>", "<|audio_end|>"),
        ("[BEGIN_AUDIO]", ""),
        ("<|audio>", "<audio|>"),
    ),
}
"""Texts before and after a placeholder, of which a model may have one pair."""
_OTHER_MEDIA = ("<|video_pad|>", "<|VIDEO|>")
_ZERO_WIDTH = "\u200b"


class Placeholders:
    """The placeholders of one model."""

    def __init__(self, tokenizer: Tokenizer, models: MediaModels) -> None:
        self._models = models.all
        self._tokens = {kind: tokenizer.token_text(model.token_id) for kind, model in self._models.items()}
        added = tokenizer.added_tokens
        self.texts = {kind: self._with_neighbors(kind, added) for kind in self._models}
        """The placeholder of each kind for a template that only takes texts."""
        ends = [each for model in self._models.values() for each in _others(model)]
        texts = [
            *self._tokens.values(),
            *map(tokenizer.token_text, ends),
            *(each for each in _OTHER_MEDIA if each in added),
        ]
        self._blinded = [(each, f"{each[:2]}{_ZERO_WIDTH}{each[2:]}") for each in texts]

    def _with_neighbors(self, kind: MediaKind, added: Mapping[str, int]) -> str:
        if _around(self._models[kind]) != ([], []):
            return self._tokens[kind]
        pairs = (pair for pair in _AROUND[kind] if all(not each or each in added for each in pair))
        before, after = next(pairs, ("", ""))
        return f"{before}{self._tokens[kind]}{after}"

    def blind(self, value: Any) -> Any:
        """Returns the JSON value with a zero-width character inserted into each placeholder in its texts, so
        that it is not read as one. Returns ``value`` itself if there is none."""
        if isinstance(value, PartedText):
            parts = [self._blind_text(part) for part in value.parts]
            return value if parts == value.parts else PartedText.of(parts)
        if isinstance(value, str):
            return self._blind_text(value)
        if isinstance(value, Mapping):
            items = {key: self.blind(item) for key, item in value.items()}
            same = all(items[key] is item for key, item in value.items())
            return value if same else items
        if isinstance(value, list | tuple):
            blinded = [self.blind(item) for item in value]
            same = all(new is old for new, old in zip(blinded, value, strict=True))
            return value if same else blinded
        return value

    def _blind_text(self, text: str) -> str:
        for each, harmless in self._blinded:
            if each in text:
                text = text.replace(each, harmless)
        return text

    def rendered(
        self,
        messages: list[Message],
        counts: Mapping[MediaKind, int],
        render: Callable[[list[Message]], str],
        *,
        in_parts: bool,
    ) -> str:
        """Renders a conversation with a part of ``MEDIA_PARTS`` for each picture and clip, of which there are
        ``counts``. If the template takes no parts, or drops some of them (for example those of tools'
        messages), it gets all as text. RequestError if it drops those, too."""
        if not any(counts.values()):
            return self._checked(render(messages), counts)
        as_texts = [with_media_texts(message, self.texts, in_parts=in_parts) for message in messages]
        try:
            return self._checked(render(messages if in_parts else as_texts), counts)
        except RequestError:
            if not in_parts:
                raise
        return self._checked(render(as_texts), counts)

    def _checked(self, text: str, counts: Mapping[MediaKind, int]) -> str:
        for kind, token in self._tokens.items():
            if (found := text.count(token)) != counts.get(kind, 0):
                raise RequestError(
                    f"The chat template shows {found} of the {counts.get(kind, 0)} {kind.noun}s in the "
                    "conversation.",
                    "messages",
                )
        return text

    def num_tokens(self, media: StoredMedia) -> int:
        """Number of tokens of a picture or clip in a prompt."""
        return self._models[media.kind].num_tokens(media.size)

    def num_more(self, media: Sequence[StoredMedia]) -> int:
        """How many tokens expanding the placeholders adds to a prompt."""
        around = {kind: sum(map(len, _around(model))) for kind, model in self._models.items()}
        return sum(self.num_tokens(each) - 1 + around[each.kind] for each in media)

    def expanded(
        self, token_ids: list[int], media: Sequence[StoredMedia]
    ) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """Returns the prompt with each placeholder repeated for each token of its picture or clip, and their
        spans. Those of a kind are in the order of its placeholders.

        RequestError unless there is one placeholder for each.
        """
        kinds = {model.token_id: kind for kind, model in self._models.items()}
        self._check_counts(token_ids, media)
        waiting = {kind: iter([each for each in media if each.kind is kind]) for kind in self._models}
        prompt: list[int] = []
        spans: list[MediaSpan] = []
        start = 0
        for place in _places(token_ids, kinds.keys()):
            prompt += token_ids[start:place]
            kind = kinds[token_ids[place]]
            each = next(waiting[kind])
            before, after = _around(self._models[kind])
            its = self._models[kind].token_ids(each.size)
            prompt += before
            spans.append(MediaSpan(each.content_hash, len(prompt), len(its), each.size, each.path or ""))
            prompt += [*its, *after]
            start = place + 1
        prompt += token_ids[start:]
        return prompt, tuple(spans)

    def _check_counts(self, token_ids: list[int], media: Sequence[StoredMedia]) -> None:
        counts = Counter(each.kind for each in media)
        for kind, token in self._tokens.items():
            found = token_ids.count(self._models[kind].token_id)
            if found != counts[kind]:
                raise RequestError(
                    f"The prompt has {found} placeholders {token} for {counts[kind]} {kind.noun}s.", "prompt"
                )


def _around(model: MediaModel) -> tuple[list[int], list[int]]:
    """The tokens before and after each clip that a template leaves to the model's processor."""
    if not isinstance(model, AudioModel):
        return [], []
    before, after = ([] if each is None else [each] for each in (model.begin_id, model.end_id))
    return before, after


def _others(model: MediaModel) -> list[int]:
    """The tokens at the ends of a picture's rows, or around a clip."""
    if isinstance(model, PictureModel):
        return [each for each in (model.row_end_id, model.end_id) if each is not None]
    before, after = _around(model)
    return [*before, *after]


def _places(token_ids: list[int], wanted: Collection[int]) -> Iterator[int]:
    """Yields the places of these tokens."""
    return (index for index, token in enumerate(token_ids) if token in wanted)
