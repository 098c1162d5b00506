"""Placeholders of pictures in prompts: a part or a text for the chat template, which is then expanded to as
many tokens as the model's encoder makes embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import RequestError
from engine.media.store import StoredPicture
from engine.records.messages import MediaSpan
from engine.records.picture import PictureModel
from engine.tokenization.parted_text import PartedText
from engine.tokenization.picture_parts import with_picture_texts
from engine.tokenization.tokenizer import Tokenizer

Message = dict[str, Any]

_AROUND = ("<|vision_start|>", "<|vision_end|>")
_OTHER_MEDIA = ("<|video_pad|>",)
_ZERO_WIDTH = "\u200b"


class Placeholders:
    """The placeholders of one model."""

    def __init__(self, tokenizer: Tokenizer, model: PictureModel) -> None:
        self._model = model
        self._token = tokenizer.token_text(model.token_id)
        added = tokenizer.added_tokens
        before, after = _AROUND if all(each in added for each in _AROUND) else ("", "")
        self.text = f"{before}{self._token}{after}"
        """The placeholder of a picture for a template that only takes texts."""
        ends = (model.row_end_id, model.end_id)
        others = [tokenizer.token_text(each) for each in ends if each is not None]
        self._blinded = [
            (each, f"{each[:2]}{_ZERO_WIDTH}{each[2:]}")
            for each in (self._token, *others, *(each for each in _OTHER_MEDIA if each in added))
        ]

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
        num_pictures: int,
        render: Callable[[list[Message]], str],
        *,
        in_parts: bool,
    ) -> str:
        """Renders a conversation with a ``PICTURE_PART`` per picture. If the template takes no parts, or
        drops some pictures (for example those of tools' messages), it gets all of them as text. RequestError
        if it drops those, too."""
        if not num_pictures:
            return self._checked(render(messages), num_pictures)
        as_texts = [with_picture_texts(message, self.text, in_parts=in_parts) for message in messages]
        try:
            return self._checked(render(messages if in_parts else as_texts), num_pictures)
        except RequestError:
            if not in_parts:
                raise
        return self._checked(render(as_texts), num_pictures)

    def _checked(self, text: str, num_pictures: int) -> str:
        if (found := text.count(self._token)) != num_pictures:
            raise RequestError(
                f"The chat template shows {found} of the {num_pictures} pictures in the conversation.",
                "messages",
            )
        return text

    def num_tokens(self, picture: StoredPicture) -> int:
        """Number of tokens of a picture in a prompt."""
        return self._model.num_tokens(picture.height, picture.width)

    def num_more(self, pictures: Sequence[StoredPicture]) -> int:
        """How many tokens expanding the placeholders adds to a prompt."""
        return sum(self.num_tokens(picture) - 1 for picture in pictures)

    def expanded(
        self, token_ids: list[int], pictures: Sequence[StoredPicture]
    ) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """Returns the prompt with each placeholder repeated for each token of its picture, and the pictures'
        spans.

        RequestError unless there is one placeholder per picture.
        """
        token_id = self._model.token_id
        found = token_ids.count(self._model.token_id)
        if found != len(pictures):
            raise RequestError(
                f"The prompt has {found} placeholders {self._token} for {len(pictures)} pictures.", "prompt"
            )
        prompt: list[int] = []
        spans: list[MediaSpan] = []
        start = 0
        for picture in pictures:
            end = token_ids.index(token_id, start)
            prompt += token_ids[start:end]
            its = self._model.token_ids(picture.height, picture.width)
            spans.append(MediaSpan(picture.content_hash, len(prompt), len(its), picture.pixels))
            prompt += its
            start = end + 1
        prompt += token_ids[start:]
        return prompt, tuple(spans)
