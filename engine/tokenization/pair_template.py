"""Puts a query and a document into one chat, as rerankers that are language models read them."""

from __future__ import annotations

from engine.errors import RequestError
from engine.tokenization.content_format import ContentFormat
from engine.tokenization.tokenizer import Tokenizer

ROLES = ("query", "document")
"""The roles of the two messages, as sentence-transformers and V1 name them."""
_TRIAL = ("a query on trial", "its document")


class PairTemplate:
    """One chat template that renders both roles."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, *, system: str = "") -> None:
        """``chat_template``: None means the folder's own. ``system``: an instruction before the pair.
        RequestError if the template omits one of the texts."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._system = system
        self.adds_special_tokens = chat_template is not None
        """Whether the tokenizer adds its special tokens; the folder's own template writes them itself."""
        formats = (ContentFormat.STRING, ContentFormat.OPENAI)
        found = next((each for each in formats if self._takes(each)), None)
        if found is None:
            raise RequestError(
                "chat_template must render the contents of two messages, with the roles query and document.",
                "chat_template",
            )
        self._format = found

    def text(self, query: str, document: str) -> str:
        """The chat of two texts."""
        return self._rendered(query, document, self._format)

    def _takes(self, content_format: ContentFormat) -> bool:
        try:
            rendered = self._rendered(*_TRIAL, content_format)
        except RequestError:
            return False
        return all(text in rendered for text in _TRIAL) and "'type'" not in rendered

    def _rendered(self, query: str, document: str, content_format: ContentFormat) -> str:
        texts = zip(ROLES, (query, document), strict=True)
        messages = [{"role": role, "content": text} for role, text in texts]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        return self._tokenizer.chat_text(
            messages,
            chat_template=self._chat_template,
            add_generation_prompt=False,
            content_format=content_format,
        )
