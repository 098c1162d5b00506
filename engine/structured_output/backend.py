"""Grammars over one tokenizer, by llguidance: compiles and advances them, and fills the bitmasks of a step.

Any thread may call this module, with one call at a time per grammar in use. The library releases the
interpreter lock while it works.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import RequestError
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.grammar_text import grammar_text
from engine.structured_output.text_ends import can_end

if TYPE_CHECKING:
    from engine.tokenization.tokenizer import Tokenizer

MAX_FILL_THREADS = 8
MIN_FORCED_BYTES = 2
"""A shorter forced text is not worth a draft, since a longer token may be sampled."""
MAX_TOKEN_BYTES = 32
"""Maximum number of bytes of forced text that are examined per requested token."""
_SPECIAL_TOKEN = re.compile(rb"\xff\[(\d+)\]")
"""Matches a special token in forced bytes, as the library writes it: no text contains this byte."""
MAX_REASON_CHARS = 300
"""Maximum characters of the library's own error text, which quotes its input."""

_LIMITS = LLParserLimits(
    max_grammar_size=200_000, max_lexer_states=50_000, max_items_in_row=10_000, verbose_errors=False
)
"""Limits of the library: a grammar in use grows to less than 100 MB. An object may have some 2,000
optional fields."""


class TokenTable(msgspec.Struct):
    """The data about a model's tokens that grammars need."""

    tokenizer_json: str | None
    """The tokenizer in the format of the tokenizers library; None if it cannot be written in that format."""
    vocab_size: int
    """Number of tokens in the model's vocabulary."""
    num_tokens: int
    """The larger of the model's and the tokenizer's vocabulary: either may have tokens that the other does
    not have."""
    eos_token_id: int | None
    added_tokens: dict[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
        added = tokenizer.added_tokens
        text = None
        num_tokens = max(vocab_size, max(added.values(), default=-1) + 1)
        if tokenizer.backend is not None:
            backend = copy(tokenizer.backend)
            backend.no_padding()
            backend.no_truncation()
            text = backend.to_str()
            num_tokens = max(num_tokens, backend.get_vocab_size())
        return cls(text, vocab_size, num_tokens, tokenizer.eos_token_id, added)


class GrammarBackend:
    """The library, configured with the tokens of a model."""

    def __init__(self, table: TokenTable) -> None:
        """Takes up to a second. RequestError for a tokenizer that the library does not support."""
        self.vocab_size = table.vocab_size
        self._eos_token_id = table.eos_token_id
        self._added_tokens = table.added_tokens
        self._tokens = _library_tokens(table)
        self._num_mask_words = -(-self._tokens.vocab_size // 32)
        self._executor = LLExecutor(max(1, min(MAX_FILL_THREADS, (os.cpu_count() or 1) // 2)))

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Returns the compiled grammar; RequestError if it is invalid, too large, or unsupported by the
        library."""
        params.verify()
        matcher = self._matcher(params)
        for number, text in enumerate(params.texts or ()):
            if text is not None and not self._can_end(params, number, text):
                raise RequestError(f"{params.field} also matches the tag that ends its text.", params.field)
        return CompiledGrammar(matcher, self._tokens, self._eos_token_id)

    def _can_end(self, params: StructuredOutputsParams, number: int, text: str) -> bool:
        """Whether a text between tags can end."""
        assert params.grammar is not None
        assert params.text_end is not None
        rules = params.grammar.partition("\n")[2]
        ended = msgspec.structs.replace(
            params, reasoning=None, grammar=f"start: @text_{number} text_end\n{rules}"
        )
        alone = StructuredOutputsParams(grammar=text, asked_in=params.asked_in)
        ends = [self._tokens.tokenize_str(params.text_end), self._with_tokens(params.text_end)]
        not_text = [*self._added_tokens.values()]
        not_text += [] if self._eos_token_id is None else [self._eos_token_id]
        return can_end(self._matcher(alone), self._matcher(ended), ends, not_text)

    def _with_tokens(self, text: str) -> list[int]:
        """Tokenizes a text that may contain added tokens."""
        added = "|".join(map(re.escape, self._added_tokens))
        pieces = filter(None, re.split(f"({added})", text))
        return [
            token_id
            for piece in pieces
            for token_id in (
                [self._added_tokens[piece]]
                if piece in self._added_tokens
                else self._tokens.tokenize_str(piece)
            )
        ]

    def _matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        text = grammar_text(params, self._added_tokens)
        try:
            matcher = LLMatcher(self._tokens, text, log_level=0, limits=_LIMITS)
        except ValueError as error:  # for example a text that is not Unicode
            raise RequestError(f"{params.field} is wrong: {_short(str(error))}", params.field) from error
        probe = matcher.deep_copy()
        if not probe.is_error():
            _take_a_step(probe)
        if probe.is_error():
            raise RequestError(f"{params.field} is wrong: {_short(probe.get_error())}", params.field)
        return matcher

    def forbidden(self, grammars: Sequence[MatcherGrammar]) -> npt.NDArray[np.bool_]:
        """The tokens that may not come next: [num_grammars, vocab_size]."""
        bits = np.empty((len(grammars), self._num_mask_words), dtype=np.int32)
        with _as_exception():
            self._executor.unsafe_compute_mask_ptr(
                [(grammar.matcher, row) for row, grammar in enumerate(grammars)],
                bits.ctypes.data,
                bits.shape[1] * bits.itemsize,
                len(grammars),
            )
        packed = np.invert(bits, out=bits).view(np.uint8)
        forbidden = np.unpackbits(packed, axis=1, count=self.vocab_size, bitorder="little").view(np.bool_)
        for row, grammar in zip(forbidden, grammars, strict=True):
            grammar.set_endings(row)
        return forbidden


def _take_a_step(matcher: LLMatcher) -> None:
    """Consumes a token, because a grammar that is too large for the library fails only then."""
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    if not matcher.is_error():
        matcher.consume_token(int(allowed.argmax()))


class CompiledGrammar:
    """A compiled grammar, which is started once per request."""

    def __init__(self, matcher: LLMatcher, tokens: LLTokenizer, eos_token_id: int | None) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._eos_token_id = eos_token_id

    def start(self, params: SamplingParams) -> MatcherGrammar:
        return MatcherGrammar(self._matcher.deep_copy(), self._tokens, params, self._eos_token_id)


class MatcherGrammar:
    """A grammar with the state of one request: the core's ``TokenGrammar``."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: LLTokenizer,
        params: SamplingParams,
        eos_token_id: int | None,
    ) -> None:
        """``eos_token_id`` is the one that the library knows."""
        self.matcher = matcher
        self._tokens = tokens
        self._ending_token_ids = params.ending_token_ids
        self._other_endings = [i for i in self._ending_token_ids if i != eos_token_id]
        self._ignored_eos = eos_token_id if params.ignore_eos else None

    def accept(self, token_id: int) -> bool:
        """Advances by a token; False if the grammar does not allow it, or exceeds the library's limits."""
        if token_id in self._ending_token_ids:
            return not self.matcher.is_error()
        with _as_exception():
            return self.matcher.consume_token(token_id)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, not counting from one that ends the request: a token is
        sampled after each draft, so a draft cannot be the last token."""
        ending = self._ending_token_ids
        inner = next((i for i, token in enumerate(token_ids) if token in ending), len(token_ids))
        with _as_exception():
            behind = self.matcher.deep_copy()  # some disallowed tokens stop a matcher that tries them
            num_allowed = int(behind.try_consume_tokens(list(token_ids[:inner])))
            return num_allowed - (num_allowed > 0 and behind.is_stopped())

    @property
    def only(self) -> int | None:
        """Always None; see ``ThinkingBudget``."""
        return None

    @property
    def matched(self) -> MatcherGrammar | None:
        """The grammar from which masks are computed."""
        return self

    def forced(self, most: int) -> list[int]:
        """See ``TokenGrammar``."""
        token_ids: list[int] = []
        with _as_exception():
            # Uses a copy: with llguidance 1.9, the matcher itself may fail at its next mask after this call.
            text = self.matcher.deep_copy().compute_ff_bytes()[: most * MAX_TOKEN_BYTES]
            if len(text) < MIN_FORCED_BYTES:
                return []
            for number, piece in enumerate(_SPECIAL_TOKEN.split(text)):
                token_ids += [int(piece)] if number % 2 else self._tokens.tokenize_bytes(piece)
        return token_ids[:most]

    def ahead(self, token_ids: Sequence[int]) -> list[MatcherGrammar]:
        """Returns copies advanced by each of these tokens in turn, which are allowed."""
        copies: list[MatcherGrammar] = []
        for token_id in token_ids:
            following = copy(copies[-1] if copies else self)
            with _as_exception():
                following.matcher = following.matcher.deep_copy()
                following.matcher.consume_token(token_id)
            copies.append(following)
        return copies

    @property
    def complete(self) -> bool:
        """Whether no token can follow."""
        return self.matcher.is_stopped()

    def set_endings(self, forbidden: npt.NDArray[np.bool_]) -> None:
        """Adjusts a row of forbidden tokens, shape [vocab_size]. The library allows only the tokenizer's EOS
        where the output may end; this allows the request's other ending tokens there, too, and forbids an
        ignored EOS."""
        if self._other_endings and self.matcher.is_accepting():
            forbidden[[i for i in self._other_endings if i < len(forbidden)]] = False
        if self._ignored_eos is not None and self._ignored_eos < len(forbidden):
            forbidden[self._ignored_eos] = True


@contextmanager
def _as_exception() -> Iterator[None]:
    """Raises a panic of the library as an ``Exception``: it is not one, and would end the thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(_short(str(error))) from error
        raise


def _library_tokens(table: TokenTable) -> LLTokenizer:
    if table.tokenizer_json is None:
        raise RequestError(
            "This model's tokenizer is pure Python, which structured output does not support.",
            "structured_outputs",
        )
    try:
        return LLTokenizer(table.tokenizer_json, n_vocab=table.num_tokens, eos_token=table.eos_token_id)
    except ValueError as error:
        raise RequestError(
            f"This model's tokenizer does not work with structured output: {_short(str(error))}",
            "structured_outputs",
        ) from error


def _short(reason: str) -> str:
    """The library's reason as one line, truncated to ``MAX_REASON_CHARS``."""
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"
