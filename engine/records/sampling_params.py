"""How one request's tokens are chosen. V1's names and defaults; crosses the process boundary as msgpack."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import msgspec

from engine.errors import RequestError
from engine.records.row_failures import NOTHING_ALLOWED
from engine.records.structured_outputs import ReasoningSpan, StructuredOutputsParams, ThinkingLimit

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
"""Longest stop string; the search keeps that much text while the request runs."""
MAX_BAD_WORDS = 1024
MAX_N = 128
MAX_PATTERN_SIZE = 512
"""Longest pattern that is searched for: each token may take that many comparisons."""
MAX_LOGIT_BIAS = 100.0
"""Larger biases are clamped, as in V1: in 32 bits a huge one is infinite, and no probability is left."""


class RequestOutputKind(IntEnum):
    """What an output carries: all text so far, only what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetection(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Ends an output that repeats itself: a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens
    has come ``min_count`` times in a row. V1's names."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def verify(self) -> None:
        """Raise RequestError for a pattern that can never be found, or takes long to search for."""
        if not 1 <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            self._refuse("max_pattern_size", f"in [1, {MAX_PATTERN_SIZE}]", self.max_pattern_size)
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            limit = f"in [0, max_pattern_size ({self.max_pattern_size})]"
            self._refuse("min_pattern_size", limit, self.min_pattern_size)
        if self.min_count < 2:
            self._refuse("min_count", "at least 2", self.min_count)

    def _refuse(self, name: str, limit: str, value: int) -> None:
        field = f"repetition_detection.{name}"
        raise RequestError(f"{field} must be {limit}, got {value}.", field)


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sampling parameters of a request. ``verify()`` raises RequestError naming field and limit."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 mean all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None means up to the context length."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of alternatives to return per token; None returns none, 0 the chosen token's only."""
    prompt_logprobs: int | None = None
    """Number of alternatives per token of the prompt, which is then recomputed, and not cached for others."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    replay_token_ids: list[int] | None = None
    """The output begins with exactly these tokens (the forward pass is real), for deterministic benchmarks;
    if neither ``max_tokens`` nor the last of them ends it, sampling goes on from there."""
    routed_experts_prompt_start: int = 0
    """Number of the prompt's first tokens whose experts are not returned, where experts are."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the output, which ends where nothing can follow, even before ``min_tokens``. With
    ``replay_token_ids`` it is as it was recorded, and this is only validated."""
    reasoning: ReasoningSpan | None = None
    """The reasoning, in which stop strings are ignored: they end the answer, and it may mention them."""
    thinking_token_budget: int | None = None
    """The most tokens of ``reasoning``, which must then be set: after them, its end follows."""
    repetition_detection: RepetitionDetection | None = None
    """The repetition that ends the output with the reason ``repetition``, not before ``min_tokens``; it never
    ends recorded tokens (``replay_token_ids``)."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    # Filled in by the InputProcessor, which knows the tokenizer.
    eos_token_id: int | None = None
    bad_words_token_ids: list[list[int]] | None = None
    thinking_limit: ThinkingLimit | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def repetition_of_output(self) -> RepetitionDetection | None:
        """The repetition that ends the output; None for recorded tokens, which are never ended."""
        return None if self.replay_token_ids is not None else self.repetition_detection

    @property
    def constrained(self) -> bool:
        """Whether a grammar chooses among the tokens."""
        is_limited = self.structured_outputs is not None or self.thinking_limit is not None
        return is_limited and self.replay_token_ids is None

    @property
    def ending_token_ids(self) -> set[int]:
        """Tokens that end the request, EOS included unless it is ignored."""
        ids = set(self.stop_token_ids)
        if self.eos_token_id is not None and not self.ignore_eos:
            ids.add(self.eos_token_id)
        return ids

    def verify(self) -> None:
        """Raise RequestError for the first parameter that is of a wrong type, or out of its range."""
        self._read_mappings()
        self._verify_types()
        self._verify_numbers()
        self._verify_lists()

    def _read_mappings(self) -> None:
        """Convert mappings into the records that they describe, as for a body."""
        kinds: dict[str, type[Any]] = {
            "structured_outputs": StructuredOutputsParams,
            "repetition_detection": RepetitionDetection,
        }
        for field, kind in kinds.items():
            given: Any = getattr(self, field)
            if isinstance(given, dict):
                setattr(self, field, _told(field, given, kind))

    def _verify_types(self) -> None:
        """Decode the parameters as the core will: a caller in Python may have given anything."""
        try:
            # Without the grammar, which has separate types and may take a megabyte.
            _DECODER.decode(msgspec.msgpack.encode(msgspec.structs.replace(self, structured_outputs=None)))
        except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
            raise RequestError(f"The sampling parameters are wrong: {error}.", _field_of(error)) from error

    def _verify_numbers(self) -> None:
        for name, low, high in (
            ("n", 1, MAX_N),
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.01, 100.0),
            ("min_tokens", 0, math.inf),
            ("routed_experts_prompt_start", 0, math.inf),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise RequestError(f"{name} must be in [{low}, {high}], got {value}.", name)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.", "top_p")
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1, 0 or positive, got {self.top_k}.", "top_k")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}.", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(f"{name} must be in [0, {MAX_LOGPROBS}], got {count}.", name)
        if self.thinking_token_budget is not None and self.thinking_token_budget < 0:
            raise RequestError(
                f"thinking_token_budget must not be negative, got {self.thinking_token_budget}.",
                "thinking_token_budget",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError("seed must fit in 64 bits.", "seed")

    def _verify_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop holds at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}.", "stop"
            )
        if max(map(len, self.stop), default=0) > MAX_STOP_CHARS:
            raise RequestError(f"stop holds strings of at most {MAX_STOP_CHARS} characters.", "stop")
        if any(not text for text in self.stop):
            raise RequestError("stop must not hold an empty string.", "stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize, which is off.", "stop")
        if len(self.bad_words) > MAX_BAD_WORDS or max(map(len, self.bad_words), default=0) > MAX_STOP_CHARS:
            raise RequestError(
                f"bad_words holds at most {MAX_BAD_WORDS} strings of {MAX_STOP_CHARS} characters.",
                "bad_words",
            )
        if any(not text for text in self.bad_words):
            raise RequestError("bad_words must not hold an empty string.", "bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty.", "allowed_token_ids")
        if self.replay_token_ids is not None and not self.replay_token_ids:
            raise RequestError("replay_token_ids must not be empty.", "replay_token_ids")
        if not all(map(math.isfinite, (self.logit_bias or {}).values())):
            raise RequestError("logit_bias must hold finite numbers.", "logit_bias")
        if self.structured_outputs is not None:
            self.structured_outputs.verify()
        if self.repetition_detection is not None:
            self.repetition_detection.verify()

    def verify_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a token id outside ``[0, vocab_size)``, for more ids than there are, or if
        no token is left."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            if len(ids) > vocab_size:
                raise RequestError(f"{name} holds more ids than the vocabulary has ({vocab_size}).", name)
        check_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        check_vocabulary("logit_bias", self.logit_bias or (), vocab_size)
        check_vocabulary("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        check_vocabulary("replay_token_ids", self.replay_token_ids or (), vocab_size)
        for word in self.bad_words_token_ids or ():
            check_vocabulary("bad_words", word, vocab_size)
        if self.eos_token_id is not None:
            check_vocabulary("eos_token_id", [self.eos_token_id], vocab_size)
        if self.replay_token_ids is None:
            self._verify_choice(vocab_size)

    def _verify_choice(self, vocab_size: int) -> None:
        """Raise RequestError if the limits that hold for the first token leave none."""
        banned = {word[0] for word in self.bad_words_token_ids or () if len(word) == 1}
        if self.min_tokens:
            banned |= self.ending_token_ids
        if self.allowed_token_ids is not None:
            if banned.issuperset(self.allowed_token_ids):
                raise RequestError(NOTHING_ALLOWED, "allowed_token_ids")
        elif len(banned) >= vocab_size:
            raise RequestError(NOTHING_ALLOWED, "bad_words")


_DECODER = msgspec.msgpack.Decoder(SamplingParams)


def _told(field: str, mapping: dict[str, Any], kind: type[Any]) -> Any:
    """The record of a mapping; RequestError for an invalid one, or a name that the record does not have."""
    names = {each.name for each in msgspec.structs.fields(kind)}
    for name in mapping:
        if name not in names:
            raise RequestError(f"{field} has no {str(name)[:100]!r}.", field)
    try:
        return msgspec.convert(mapping, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"{field} is wrong: {error}.", field) from error


def _field_of(error: Exception) -> str | None:
    """The parameter that msgspec names, as in "Expected `int`, got `str` - at `$.top_k`"."""
    _, found, path = str(error).partition("`$.")
    return re.split(r"[^a-z_]", path, maxsplit=1)[0] if found else None


def check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int, field: str | None = None) -> None:
    """Raise RequestError for a token id outside ``[0, vocab_size)``."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds {_shown(token)}, outside the vocabulary [0, {vocab_size}).", field or name
            )


def _shown(token: int) -> str:
    """The token id as text, if it is short: a number may have thousands of digits."""
    return str(token) if abs(token) < 2**64 else "a number of more than 64 bits"
