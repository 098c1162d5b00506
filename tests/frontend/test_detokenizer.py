"""Streamed text has whole characters, ends as the same text, and shows nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from engine.frontend.detokenizer import (
    REPLACEMENT,
    IncrementalDetokenizer,
    StopChecker,
    StreamTokenDecoder,
    TokenDecoder,
)
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import ReasoningSpan
from engine.tokenization.tokenizer import Tokenizer


def wrapped(backend: BackendTokenizer) -> Tokenizer:
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=False
    )
    return Tokenizer(fast)


def byte_level_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, like the base of GPT's vocabularies; ids are not the bytes."""
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    backend = BackendTokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer with bytes and spaces as SentencePiece writes them, like Llama 2 and Mistral."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "▁b"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = BackendTokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend)


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
DECODERS = pytest.mark.parametrize("decoder", [TokenDecoder, StreamTokenDecoder])
byte_strings = st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))


def byte_level_ids(content: bytes) -> list[int]:
    vocabulary = BYTE_LEVEL.hf.get_vocab()
    return [vocabulary[character] for character in as_byte_level(content)]


def as_byte_level(content: bytes) -> list[str]:
    """The characters as which GPT-2 writes bytes: printable ones as themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in content]


def run(
    kind: type[TokenDecoder], tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = ()
) -> tuple[list[str], str]:
    """Returns the streamed pieces, and the text that the end added."""
    decoder = kind(tokenizer, SamplingParams(), prompt)
    return [decoder.step(token_id) for token_id in token_ids], decoder.flush()


@DECODERS
@given(content=byte_strings, prompt=byte_strings)
def test_any_bytes_end_as_the_tokenizer_decodes_them(
    decoder: type[TokenDecoder], content: bytes, prompt: bytes
) -> None:
    """For any bytes, valid UTF-8 or not, the final text is that of ``decode``."""
    token_ids = byte_level_ids(content)
    prompt_ids = byte_level_ids(prompt.decode("utf-8", "ignore").encode())
    pieces, rest = run(decoder, BYTE_LEVEL, token_ids, prompt_ids)
    assert "".join(pieces) + rest == BYTE_LEVEL.decode(token_ids)


@DECODERS
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=20))
def test_no_half_character_is_streamed(decoder: type[TokenDecoder], text: str) -> None:
    """A character of several tokens is streamed whole, with its last token."""
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        content = text.encode()
        token_ids = byte_level_ids(content) if tokenizer is BYTE_LEVEL else list(content)
        prompt = byte_level_ids(b"abcd") if tokenizer is BYTE_LEVEL else list(b"abcd")
        pieces, rest = run(decoder, tokenizer, token_ids, prompt)
        assert "".join(pieces) == text
        assert rest == ""
        assert not any(REPLACEMENT in piece for piece in pieces)


@DECODERS
@given(token_ids=st.lists(st.integers(0, 260).filter(lambda token: token not in (97, 98)), max_size=30))
def test_a_decoder_that_rewrites_its_text_does_no_harm(
    decoder: type[TokenDecoder], token_ids: list[int]
) -> None:
    """With byte fallback a late wrong byte changes earlier text: streamed text stays, nothing is lost."""
    pieces, rest = run(decoder, BYTE_FALLBACK, token_ids, list(b"abcd"))
    letters = ["ab"[(token - 257) % 2] for token in token_ids if token >= 257]
    assert [character for character in "".join(pieces) + rest if character in "ab"] == letters


@DECODERS
def test_a_space_at_the_start_depends_on_the_prompt(decoder: type[TokenDecoder]) -> None:
    """SentencePiece drops the first space of a text; an output is not the start of a text."""
    assert run(decoder, BYTE_FALLBACK, [259, 260], list(b"abcd"))[0] == [" a", " b"]


def detokenize(
    params: SamplingParams, token_ids: list[int], chunks: Sequence[int] = ()
) -> tuple[str, str | None, list[str]]:
    """Returns final text, stop string and deltas; tokens arrive in chunks of these sizes, then singly."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, params, [])
    deltas: list[str] = []
    sizes = iter(chunks)
    position = 0
    stop = None
    while stop is None and position < len(token_ids):
        size = next(sizes, 1)
        chunk = token_ids[position : position + size]
        position += size
        stop = detokenizer.update(chunk, finished=position >= len(token_ids), stop_token=False)
        deltas.append(detokenizer.next_output(finished=False, delta=True)[0])
    deltas.append(detokenizer.next_output(finished=True, delta=True)[0])
    return detokenizer.next_output(finished=True, delta=False)[0], stop, deltas


def cut_by_plain_find(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Defines stop strings: the text ends where the first one is complete (of several, the longest)."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


short_texts = st.text("abé ", max_size=24)
stop_lists = st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=4)


@given(short_texts, stop_lists, st.booleans(), st.lists(st.integers(1, 6), max_size=10))
def test_stop_strings_mean_what_find_means(
    text: str, stops: list[str], include: bool, chunks: list[int]
) -> None:
    """However the text arrives, it ends at the stop string that is complete first."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    final, stop, deltas = detokenize(params, byte_level_ids(text.encode()), chunks)
    assert (final, stop) == cut_by_plain_find(text, stops, include)
    assert "".join(deltas) == final


@given(short_texts, stop_lists, st.lists(st.integers(1, 6), max_size=10))
def test_no_part_of_a_stop_string_is_streamed(text: str, stops: list[str], chunks: list[int]) -> None:
    """Streamed text is always a prefix of the final text: nothing has to be taken back."""
    final, _, deltas = detokenize(SamplingParams(stop=stops), byte_level_ids(text.encode()), chunks)
    for count in range(len(deltas) + 1):
        assert final.startswith("".join(deltas[:count]))


@given(short_texts, stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    """Text that cannot be the start of a stop string is streamed at once."""
    held = StopChecker(SamplingParams(stop=stops)).num_held_back(text)
    possible = [
        n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) and len(s) > n for s in stops)
    ]
    assert held == max(possible, default=0)


def test_stop_strings_wait_for_min_tokens() -> None:
    """A stop string within the first ``min_tokens`` tokens does not end the request."""
    params = SamplingParams(stop=["b"], min_tokens=3)
    assert detokenize(params, byte_level_ids(b"abacab"))[:2] == ("abaca", "b")


@settings(max_examples=25)
@given(st.binary(max_size=12), st.booleans())
def test_the_token_that_ended_it_is_no_text(content: bytes, include: bool) -> None:
    """A stop token is always among the tokens, and in the text only on request."""
    token_ids = byte_level_ids(content + b"x")
    params = SamplingParams(include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, params, [])
    assert detokenizer.update(token_ids, finished=True, stop_token=True) is None
    text, tokens = detokenizer.next_output(finished=True, delta=False)
    assert tokens == token_ids
    assert text == BYTE_LEVEL.decode(token_ids if include else token_ids[:-1])


def test_without_detokenize_there_are_tokens_only() -> None:
    """``detokenize=False`` yields tokens and no text."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, SamplingParams(detokenize=False), [])
    detokenizer.update([1, 2], finished=False, stop_token=False)
    assert detokenizer.next_output(finished=False, delta=True) == ("", [1, 2])


def test_special_tokens_are_text_only_if_asked_for(tokenizer: Tokenizer) -> None:
    """``skip_special_tokens`` works in the stream as in ``decode``."""
    token_ids = [*tokenizer.encode("Hi"), *tokenizer.encode("<|im_start|>"), *tokenizer.encode(" there")]
    for skip, expected in ((True, "Hi there"), (False, "Hi<|im_start|> there")):
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), [])
        detokenizer.update(token_ids, finished=True, stop_token=False)
        assert detokenizer.next_output(finished=True, delta=False)[0] == expected


@pytest.mark.parametrize(
    ("start", "text", "cut"),
    [
        ("<think>", "<think>a STOP b</think>the answer STOP more", "<think>a STOP b</think>the answer "),
        ("<think>", "\n<think>STOP</think>STOP", "\n<think>STOP</think>"),
        ("<think>", "no thought STOP more", "no thought "),
        ("<think>", "<thSTOP", "<th"),
        ("<think>", "<think>a STOP b", "<think>a STOP b"),
        (None, "a STOP b</think>c STOP d", "a STOP b</think>c "),
        (None, "a ST</think>OP STOP", "a ST</think>OP "),
        (None, "a STOP", "a STOP"),
    ],
)
@pytest.mark.parametrize("delta", [False, True])
def test_stop_strings_end_the_answer_not_the_thoughts(
    start: str | None, text: str, cut: str, delta: bool
) -> None:
    """Stop strings are ignored in reasoning and count from the answer's first character, in any chunks."""
    for size in (1, 3, 100):
        params = SamplingParams(stop=["STOP"], reasoning=ReasoningSpan("</think>", start))
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, params, [])
        token_ids, given, stop = byte_level_ids(text.encode()), "", None
        for at in range(0, len(token_ids), size):
            ends = at + size >= len(token_ids)
            stop = detokenizer.update(token_ids[at : at + size], finished=ends, stop_token=False)
            new, _ = detokenizer.next_output(finished=ends or stop is not None, delta=delta)
            given = given + new if delta else new
            if stop is not None:
                break
        assert (given, stop) == (cut, "STOP" if cut != text else None)
