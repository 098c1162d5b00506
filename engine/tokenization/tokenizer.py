"""The model's tokenizer and chat template. It does not know requests or sampling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError, RequestError
from engine.process.hub import hub_answers
from engine.tokenization.chat_template import ChatTemplate, ContentShape
from engine.tokenization.content_format import ContentFormat
from engine.tokenization.media_parts import kind_of_part
from engine.tokenization.parted_text import PartedText
from engine.tokenization.processor_template import processor_template
from engine.tokenization.prompt_encoder import PromptEncoder
from engine.tokenization.text_cuts import MAX_PART_CHARS, PART_CHARS, too_long_to_tokenize
from engine.tokenization.tiktoken_folder import (
    VOCABULARY_FILE,
    is_known_tiktoken_folder,
    load_tiktoken_folder,
    with_sorted_keys,
)
from engine.tokenization.token_bounds import TokenBounds
from engine.tokenization.tool_arguments import read_arguments
from engine.tokenization.unicode_text import readable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", VOCABULARY_FILE),
    *("vocab.json", "vocab.txt", "tokenizer_config.json"),
)
"""Files of a tokenizer; a folder with none of these has no tokenizer."""
INLINE_CHARS = 4096
"""A longer text is encoded off the event loop's thread, so that it does not block other streams."""

_UNREADABLE = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_NOT_FOR_TEMPLATES = frozenset(
    (
        *("tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("return_dict", "return_tensors", "conversation", "messages", "self", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)
"""Arguments of transformers that a template may not get."""


class Tokenizer:
    """A Hugging Face tokenizer as the engine uses it. ``hf`` is the tokenizer itself."""

    has_texts = True
    """False for the replacement in an engine that only knows token ids."""

    def __init__(self, hf: PreTrainedTokenizerBase, *, sorts_tools: bool = False) -> None:
        """``sorts_tools``: templates get tools with sorted keys."""
        self.hf = hf
        self._sorts_tools = sorts_tools
        # None if the tokenizer is pure Python: text is then decoded slowly.
        self.backend: BackendTokenizer | None = getattr(hf, "backend_tokenizer", None)
        self._token_texts: dict[int, str] = {}
        self._template = ChatTemplate(hf)

    @classmethod
    def load(cls, config: ModelConfig) -> Tokenizer:
        """Loads the tokenizer of a model folder; ModelLoadError if there is none."""
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        name = config.tokenizer or config.model
        if name.startswith(("/", "./", "../")) and not Path(name).is_dir():
            raise ModelLoadError(f"The folder {name} does not exist.")  # else it is read as a hub name
        if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
            raise ModelLoadError(f"The folder {name} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}.")
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # errors are raised
        try:
            if is_known_tiktoken_folder(Path(name), config.trust_remote_code):
                return cls(load_tiktoken_folder(Path(name)), sorts_tools=True)
            hf = AutoTokenizer.from_pretrained(
                name,
                trust_remote_code=config.trust_remote_code,
                local_files_only=not Path(name).is_dir() and not hub_answers(name),
            )
        except ModelLoadError:
            raise
        except Exception as error:  # the library raises many types
            hint = "" if Path(name).is_dir() else " Give a folder, or a model that was downloaded before."
            reason = _first_line(error).rstrip(".")
            raise ModelLoadError(f"Cannot load the tokenizer of {name!r}: {reason}.{hint}") from error
        if not hf.chat_template:
            hf.chat_template = processor_template(name)
        return cls(hf)

    @property
    def eos_token_id(self) -> int | None:
        eos: int | None = self.hf.eos_token_id
        return eos

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of tokens that decoding omits with ``skip_special_tokens``."""
        added = self.hf.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of tokens that are matched wherever their text occurs, special or not."""
        return {token.content: token_id for token_id, token in self.hf.added_tokens_decoder.items()}

    @cached_property
    def added_texts(self) -> dict[int, str]:
        """The texts of ``added_tokens``, by their ids."""
        return {token_id: text for text, token_id in self.added_tokens.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True, owner: str | None = None) -> list[int]:
        """Encodes a text. If it begins like earlier texts of its owner, only the rest is tokenized, if the
        tokenizer allows that; the result is then an EncodedTokens. A lone surrogate is read as U+FFFD."""
        text = readable(text)
        if self._encoder is not None and not (add_special_tokens and self._adds_special_tokens):
            return self._encoder.encode(text, owner)
        if len(text) > PART_CHARS:
            return [token for step in self.steps(text, add_special_tokens, owner) for token in step]
        return self._encode_whole(text, add_special_tokens)

    def encode_behind(self, token_id: int, text: str, *, owner: str | None = None) -> list[int] | None:
        """The tokens of a text that follows this token; None if they may depend on text before the token, or
        merge with it."""
        before = self.added_texts.get(token_id)
        if self._encoder is None or before is None or not self._encoder.cuts_at(before):
            return None
        tokens = self._encoder.encode(before + readable(text), owner)
        return tokens[1:] if tokens[0] == token_id else None

    def steps(self, text: str, add_special_tokens: bool, owner: str | None = None) -> Iterator[list[int]]:
        """Yields the text's tokens in chunks, in bounded memory. RequestError for a long text that cannot be
        split."""
        around = self._around if add_special_tokens else ([], [])
        if self._encoder is not None and around is not None:
            yield around[0]
            yield from self._encoder.steps(text, owner)
            yield around[1]
        elif len(text) <= MAX_PART_CHARS:
            yield self._encode_whole(text, add_special_tokens)
        else:
            raise too_long_to_tokenize()

    def _encode_whole(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """The tokens added before and after a prompt's own; None if they depend on the text."""
        if not self._adds_special_tokens:
            return [], []
        found = set()
        for text in ("a", "B c\n", "12"):
            inner = self._encode_whole(text, add_special_tokens=False)
            outer = self._encode_whole(text, add_special_tokens=True)
            starts = [at for at in range(len(outer)) if outer[at : at + len(inner)] == inner]
            if not inner or len(starts) != 1:
                return None
            found.add((tuple(outer[: starts[0]]), tuple(outer[starts[0] + len(inner) :])))
        before, after = found.pop()
        return None if found else (list(before), list(after))

    def fewest_tokens_beyond(self, text: str, num_tokens: int) -> int | None:
        """A lower bound of the text's tokens, if its length shows that they exceed the limit."""
        reach = self._token_reach
        return reach.fewest_tokens(text) if reach is not None and reach.exceeds(text, num_tokens) else None

    @cached_property
    def _encoder(self) -> PromptEncoder | None:
        """The caching encoder; None if texts must be tokenized as a whole."""
        backend = self._plain_backend
        return None if backend is None else PromptEncoder.of(backend)

    @cached_property
    def _token_reach(self) -> TokenBounds | None:
        """Bounds of a text's tokens by its length; None if there are none."""
        backend = self._plain_backend
        return None if backend is None else TokenBounds.of(backend)

    @property
    def _plain_backend(self) -> BackendTokenizer | None:
        """The backend, if encoding does nothing else; else None."""
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        kind = type(self.hf)
        if (
            not issubclass(kind, PreTrainedTokenizerFast)
            or kind.encode is not PreTrainedTokenizerBase.encode
            or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
            or self.hf.split_special_tokens
        ):
            return None
        return self.backend

    @cached_property
    def _adds_special_tokens(self) -> bool:
        """Whether tokens are added before or after a prompt's own."""
        return bool(self.hf.num_special_tokens_to_add(pair=False))

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        text = self.hf.decode(
            token_ids if isinstance(token_ids, list) else list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        assert isinstance(text, str)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of a single token; U+FFFD if it is part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; each token of a shared character has its own bytes of it."""
        text = self.token_text(token_id)
        return self._own_bytes(token_id) if _UNREADABLE in text else text.encode()

    def _own_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that is not a whole character, from its name in the vocabulary."""
        name = self.hf.convert_ids_to_tokens(token_id)
        if not isinstance(name, str) or token_id in self.hf.added_tokens_decoder:
            return self.token_text(token_id).encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        try:
            return bytes(_byte_alphabet()[letter] for letter in name)
        except KeyError:
            return self.token_text(token_id).encode()

    def bad_word_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of these words, at the start of a text and after a space."""
        sequences: list[list[int]] = []
        for word in words:
            bare = self.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(bare)
            # If the space is a separate token, the word needs no second form.
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(spaced)
        return [sequence for sequence in sequences if sequence]

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> list[int]:
        """Returns token ids of a conversation; RequestError if there is no template or it refuses the
        messages."""
        text = self.chat_text(
            messages,
            tools,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            content_format,
        )
        return self.encode(text, add_special_tokens=False)

    def reads_parts(
        self,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> bool:
        """Whether the template reads contents in parts; False for an invalid one."""
        try:
            return self._template.content_shape(chat_template, tools, content_format).parts
        except Exception:  # rendering reports the error
            return False

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: ContentFormat = ContentFormat.AUTO,
    ) -> str:
        """Returns the rendered text of a conversation; RequestError if there is no template or it refuses the
        messages."""
        if not messages:
            raise RequestError("messages must not be empty.", "messages")
        if chat_template is None and not self.hf.chat_template:
            raise RequestError(
                "This model has no chat template: use completions, or give a chat_template.", "messages"
            )
        tools = with_sorted_keys(tools) if self._sorts_tools else tools
        extra = dict(chat_template_kwargs or {})
        if clash := sorted(extra.keys() & _NOT_FOR_TEMPLATES):
            raise RequestError(f"chat_template_kwargs must not set {clash[0]!r}.", "chat_template_kwargs")
        try:
            shape = self._template.content_shape(chat_template, tools, content_format)
            conversation = [_as_template_expects(message, shape) for message in messages]
            return self._template.render(
                conversation,
                tools,
                chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                extra=extra,
            )
        except RequestError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"The chat template failed: {_first_line(error)}", "messages") from error


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters with which a byte-level vocabulary writes bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


def _as_template_expects(message: Message, shape: ContentShape) -> dict[str, Any]:
    """Returns the message with its content in the format that the template reads, and arguments of tool calls
    as objects."""
    expected = dict(message)
    expected["content"] = _shaped(message.get("content"), shape)
    if message.get("tool_calls"):
        expected["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return expected


def _shaped(content: Any, shape: ContentShape) -> Any:
    """Returns the content as a string or a list of parts; others are left for the template to refuse."""
    if isinstance(content, PartedText):
        content = content.parts if shape.parts else str(content)
    if content is None:
        content = ""
    if isinstance(content, list) and shape.parts:
        return [part if kind_of_part(part) else _as_part(_part_text(part)) for part in content]
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return content if shape.texts or not isinstance(content, str) else [_as_part(content)]


def _as_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"This model takes text only, got a content part of type {kind!r}.", "messages")


def _with_parsed_arguments(call: Any) -> Any:
    """Parses a call's arguments; leaves a malformed call as the model wrote it, so that an agent can send it
    back and continue."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = read_arguments(function["arguments"] or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
