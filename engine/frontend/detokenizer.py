"""Incremental detokenization: returns only whole characters, and never a part of a stop string.

It knows one request's tokens and stop strings, but not its caller or how the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import ReasoningSpan
from engine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
"""The character that a decoder writes for bytes that are not a character (yet)."""
MAX_PRIMING_TOKENS = 24
"""Maximum number of prompt tokens that are decoded to find the state at the prompt's end, such as a pending
space."""


class TokenDecoder:
    """Decodes one token at a time by decoding a short window again; works for every tokenizer.

    ``_context`` holds the tokens of the last returned text (or the prompt's last tokens), ``_pending`` the
    tokens since then: the new text is the difference between decoding both and decoding only the first.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._spaces_between_special_tokens = params.spaces_between_special_tokens
        self._context = self._priming(prompt_token_ids)
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._accept()
        return text

    def flush(self) -> str:
        """Returns the remaining text at the end: bytes that never became a character."""
        text = self._new_text() if self._pending else ""
        self._accept()
        return text

    def _accept(self) -> None:
        if self._pending:
            self._context = self._pending
            self._pending = []

    def _new_text(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        # A decoder may rewrite earlier text when later bytes arrive; returned text is never changed.
        return text[len(before) :] if text.startswith(before) else self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )

    def _priming(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The shortest end of the prompt, of at least four tokens, that consists of whole characters."""
        for length in range(4, MAX_PRIMING_TOKENS + 1):
            suffix = list(prompt_token_ids[-length:])
            if REPLACEMENT not in self._decode(suffix):
                return suffix
            if length >= len(prompt_token_ids):
                break
        return []


class StreamTokenDecoder(TokenDecoder):
    """A decoder that uses the Rust ``DecodeStream``: several times faster, for tokenizers with a backend."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, params, prompt_token_ids)
        assert tokenizer.backend is not None
        self._backend = tokenizer.backend
        self._stream = self._new_stream()

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # a plain Exception: the decoder has rewritten text that was already returned
            return self._recover()
        if not text:
            return ""
        self._accept()
        return text

    def _recover(self) -> str:
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            text = ""
        else:
            self._accept()
        self._stream = self._new_stream()
        for token_id in self._pending:
            self._stream.step(self._backend, token_id)
        return text

    def _new_stream(self) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)


class NoTextDecoder(TokenDecoder):
    """The decoder for an engine without a tokenizer: its text is always empty."""

    def __init__(self) -> None:
        pass

    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def token_decoder(
    tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> TokenDecoder:
    """Returns the fastest decoder that the tokenizer supports."""
    if not tokenizer.has_texts:
        return NoTextDecoder()
    kind = StreamTokenDecoder if tokenizer.backend is not None else TokenDecoder
    return kind(tokenizer, params, prompt_token_ids)


class AnswerFinder:
    """Finds the end of the reasoning and the start of the answer; white space before the answer is layout."""

    def __init__(self, reasoning: ReasoningSpan) -> None:
        self._reasoning = reasoning
        self._num_searched = 0
        self._is_inside = reasoning.start is None
        self.begin: int | None = None
        """Index of the answer's start; None while unknown."""

    def look(self, text: str) -> None:
        """Searches the text after it has grown."""
        if self.begin is None and not self._is_inside:
            self._look_for_start(text)
        if self.begin is None and self._is_inside:
            end = text.find(self._reasoning.end, self._num_searched)
            if end < 0:
                self._num_searched = max(0, len(text) - len(self._reasoning.end) + 1)
                return
            answer = text[end + len(self._reasoning.end) :].lstrip()
            self.begin = len(text) - len(answer) if answer else None

    def _look_for_start(self, text: str) -> None:
        start = self._reasoning.start
        begin = text.lstrip()
        assert start is not None
        if begin.startswith(start):
            self._is_inside = True
        elif not start.startswith(begin):
            self.begin = 0


class StopChecker:
    """Finds the stop string that is complete first; of several complete at once, the longest."""

    def __init__(self, params: SamplingParams) -> None:
        self._stop = params.stop
        self._answer = AnswerFinder(params.reasoning) if params.reasoning is not None else None
        self._include = params.include_stop_str_in_output
        self._longest = max(map(len, params.stop), default=0)
        self._starts = {stop[:length] for stop in params.stop for length in range(1, len(stop))}

    def find(self, text: str, num_checked: int) -> tuple[str, int] | None:
        """Returns the stop string that ends first after ``num_checked``, and the length to truncate the text
        to."""
        begin = 0
        if self._answer is not None:
            was_known = self._answer.begin is not None
            self._answer.look(text)
            if self._answer.begin is None:
                return None
            begin = self._answer.begin
            num_checked = num_checked if was_known else begin
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(begin, num_checked - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        return stop, end if self._include else start

    def num_held_back(self, text: str) -> int:
        """Length of the text's end that may be the start of a stop string."""
        if self._include or not self._stop:
            return 0
        begin = 0 if self._answer is None else self._answer.begin
        if begin is None:
            return 0
        for length in range(min(self._longest - 1, len(text) - begin), 0, -1):
            if text[-length:] in self._starts:
                return length
        return 0


class IncrementalDetokenizer:
    """The output of one request: its tokens, and its text unless ``detokenize`` is off."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._text = ""
        self._num_given = 0
        self._num_tokens_given = 0
        self._stop_checker = StopChecker(params) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._decoder: TokenDecoder | None = None
        if params.detokenize:
            self._decoder = token_decoder(tokenizer, params, prompt_token_ids)

    def update(self, token_ids: list[int], *, finished: bool, stop_token: bool) -> str | None:
        """Adds new tokens; returns the stop string that they complete, where the text then ends.
        ``stop_token``: the last token ended the request and is not part of the text."""
        already = self.token_ids
        decoder = self._decoder
        if decoder is None:
            already.extend(token_ids)
            return None
        silent = token_ids[-1:] if stop_token and not self._include_stop else []
        for token_id in token_ids[: len(token_ids) - len(silent)]:
            already.append(token_id)
            text = decoder.step(token_id)
            if text:
                stop = self._extend(text)
                if stop is not None:
                    return stop
        already.extend(silent)
        return self._extend(decoder.flush()) if finished else None

    def next_output(self, *, finished: bool, delta: bool) -> tuple[str, list[int]]:
        """Text and tokens of the next output: only the new ones if ``delta``, else all."""
        end = len(self._text)
        if not finished and self._stop_checker is not None:
            end -= self._stop_checker.num_held_back(self._text)
        if not delta:
            return self._text[:end], list(self.token_ids)
        text = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        token_ids = self.token_ids[self._num_tokens_given :]
        self._num_tokens_given = len(self.token_ids)
        return text, token_ids

    def _extend(self, new_text: str) -> str | None:
        num_checked = len(self._text)
        self._text += new_text
        if self._stop_checker is None or len(self.token_ids) <= self._min_tokens:
            return None
        found = self._stop_checker.find(self._text, num_checked)
        if found is None:
            return None
        stop, end = found
        self._text = self._text[:end]
        return stop
