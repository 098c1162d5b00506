"""Promises of custom tools' grammars where the model may choose, in formats that write a text unquoted: a
call's text follows its grammar, whatever else the reply holds."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import ModelConfig
from engine.reasoning.think import ThinkTags
from engine.records.sampling_params import SamplingParams
from engine.structured_output.backend import CompiledGrammar, GrammarBackend, TokenTable
from engine.structured_output.enforceable import enforceable
from engine.structured_output.reply_grammar import ReplyStart, free_calls, free_texts
from engine.tokenization.tokenizer import Tokenizer
from engine.tool_parsers.base import ReasoningDelta, ToolCallDelta
from engine.tool_parsers.catalog import TOOL_ALIASES, TOOL_FORMATS
from engine.tool_parsers.formats import ReplyFormat
from tests.tool_parsers.families import (
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    MINIMAX,
    QWEN3_CODER,
    SEED,
    STEP3,
    Family,
)
from tests.tool_parsers.token_folders import folder_with_tokens

RAW = (QWEN3_CODER, SEED, GLM45, GLM47, MINIMAX, DEEPSEEK_V32, STEP3)
TOKENS = (
    *("<seed:tool_call>", "</seed:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "｜DSML｜", "<｜tool_calls_begin｜>"),
    *("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("patch", "shell", "pat")]
GRAMMAR = 'start: "*** Begin" LF line+ "*** End" LF?\nline: "+" /[^<\\n]*/ LF\nLF: /\\n/\n'
FOLLOWS = re.compile(r"\*\*\* Begin\n(\+[^<\n]*\n)+\*\*\* End\n?")
THINK = ThinkTags("<think>", "</think>")
PROMPT = "<|im_start|>assistant\n<think>\n"
GOOD, BAD = '*** Begin\n+say("é")\n*** End', "*** Begin\n-a\n*** End"


@dataclass(frozen=True, slots=True)
class Text:
    """The one argument of a tool."""

    grammar: str = GRAMMAR
    parameter: str = "input"
    asked_in: str = "tools[0].format"


class World:
    """A tokenizer with its grammars."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(ModelConfig(model=str(folder)))
        self.backend = GrammarBackend(TokenTable.of(self.tokenizer, len(self.tokenizer.hf)))

    def grammar(
        self,
        family: Family,
        tags: ThinkTags | None = None,
        *,
        parallel: bool = True,
        text: str = GRAMMAR,
    ) -> CompiledGrammar:
        """The grammar of replies to ``PROMPT`` in which the text of ``patch`` follows ``text``."""
        start = ReplyStart(reply_format(family, tags), self.tokenizer.added_tokens, PROMPT)
        grammar = free_texts(TOOLS, {"patch": Text(text)}, parallel, start)
        assert grammar is not None
        return self.backend.compile(grammar.params)

    def encode(self, text: str, *, in_letters: bool = False) -> list[int]:
        """``in_letters``: also tags that are tokens are spelled out."""
        parts = text if in_letters else [text]
        return [each for part in parts for each in self.tokenizer.encode(part, add_special_tokens=False)]

    def accepts(self, grammar: CompiledGrammar, reply: str) -> bool:
        """Whether the grammar allows the whole reply, with tags as tokens and spelled out."""
        one, other = (
            self._accepts(grammar, self.encode(reply, in_letters=in_letters)) for in_letters in (False, True)
        )
        assert one == other, reply
        return one

    def _accepts(self, grammar: CompiledGrammar, token_ids: list[int]) -> bool:
        follower = grammar.start(SamplingParams())
        return all(map(follower.accept, token_ids)) and follower.matcher.is_accepting()


def reply_format(family: Family, tags: ThinkTags | None = None) -> ReplyFormat:
    name = TOOL_ALIASES.get(family.name, family.name)
    return replace(ReplyFormat.choose(name, "none", None), think_tags=tags)


@pytest.fixture(scope="module", params=["tokens", "spelled"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tokenizer in which the formats' tags are tokens, and one in which most are not."""
    tokens = TOKENS if request.param == "tokens" else ()
    return World(folder_with_tokens(tmp_path_factory.mktemp("models"), tokens))


def calls(family: Family, *texts: tuple[str, dict[str, Any]]) -> str:
    return family.render("", list(texts))


def patch(text: str, parameter: str = "input") -> tuple[str, dict[str, Any]]:
    return "patch", {parameter: text}


@pytest.mark.parametrize("family", RAW, ids=lambda family: family.name)
def test_a_text_follows_its_grammar_where_the_model_may_choose(world: World, family: Family) -> None:
    """Only the text of ``patch`` must follow a grammar; each reply is in the template's form."""
    grammar = world.grammar(family)
    shell = ("shell", {"command": f"cat <<x\n{BAD}\nx", "why": ""})
    for reply in (
        "Only text, of a <b> and so on.",
        calls(family, patch(GOOD)),
        calls(family, patch(GOOD + "\n")),
        calls(family, shell, patch(GOOD), ("pat", {})),
        f"Look:\n\n{calls(family, patch(GOOD))}\n",
        f"{calls(family, shell)}\nand {calls(family, patch(GOOD))}",
    ):
        assert world.accepts(grammar, reply), reply
    for reply in (
        calls(family, patch(BAD)),
        calls(family, shell, patch(BAD)),
        calls(family, patch(GOOD, "text")),
        calls(family, ("patch", {"input": GOOD, "more": "x"})),
        calls(family, ("patch", {})),
        calls(family, ("another", {"input": GOOD})),
        calls(family, ("pat", {}))[:-3],
    ):
        assert not world.accepts(grammar, reply), reply


LINES = "start: LINE+\nLINE: /[^\\n]*\\n/\n"


@pytest.mark.parametrize("family", RAW, ids=lambda family: family.name)
def test_a_text_ends_at_its_tag_where_it_could_go_on(world: World, family: Family) -> None:
    """Where the next line could begin like the tag, it is the tag."""
    grammar = world.grammar(family, text=LINES)
    assert world.accepts(grammar, calls(family, patch("a\n<b>\n")))
    assert not world.accepts(grammar, calls(family, patch("a\n<b>\n")).rstrip()[:-8])


@pytest.mark.parametrize("family", RAW, ids=lambda family: family.name)
def test_a_text_without_an_end_follows_none(world: World, family: Family) -> None:
    """A grammar whose last piece would absorb the tag is dropped: its call ends, and others follow."""
    start = ReplyStart(reply_format(family), world.tokenizer.added_tokens, "")
    texts = {"patch": Text(GRAMMAR), "shell": Text("start: /[\\s\\S]/ REST\nREST: /[^\\n]+/\n")}
    found = free_texts(TOOLS, texts, True, start)
    assert found is not None
    kept = enforceable(found.params, world.backend.compile)
    ends_by_token = "</arg_value>" in world.tokenizer.added_tokens and family in (GLM45, GLM47)
    by_line = family is QWEN3_CODER
    assert kept.texts == [GRAMMAR, texts["shell"].grammar if ends_by_token or by_line else None]
    grammar = world.backend.compile(kept)
    one = ("shell", {"input": "any text"})
    ids = world.encode(calls(family, one, patch(GOOD)))
    assert world._accepts(grammar, ids)
    assert not world._accepts(grammar, world.encode(calls(family, one, patch(BAD))))


@pytest.mark.parametrize("family", RAW, ids=lambda family: family.name)
def test_one_call_only_if_one_is_wanted(world: World, family: Family) -> None:
    grammar = world.grammar(family, parallel=False)
    assert world.accepts(grammar, f"So: {calls(family, patch(GOOD))}")
    assert not world.accepts(grammar, calls(family, patch(GOOD), ("pat", {})))


@pytest.mark.parametrize("family", RAW, ids=lambda family: family.name)
def test_no_call_goes_around_its_grammar_in_reasoning(world: World, family: Family) -> None:
    """A call that ends the reasoning, or would be read as one at its end, follows its grammar, too."""
    grammar = world.grammar(family, THINK)
    thought = "I patch </b> it"
    assert world.accepts(grammar, f"{thought}.</think>\n\nSo: {calls(family, patch(GOOD))}")
    assert world.accepts(grammar, f"{thought}.</think>\n\nDone.")
    ends_thinking = reply_format(family).ends_thinking != ()
    assert world.accepts(grammar, thought + calls(family, patch(GOOD))) is ends_thinking
    assert not world.accepts(grammar, f"{thought}.</think>\n\nSo: {calls(family, patch(BAD))}")
    assert not world.accepts(grammar, thought + calls(family, patch(BAD)))
    assert not world.accepts(grammar, f"{thought}{calls(family, patch(BAD))}</think>")


def pieces_of(family: Family) -> list[str]:
    """Pieces for random replies: whole calls, single tags, beginnings of other formats."""
    bad, good, other = (
        calls(family, patch(BAD)),
        calls(family, patch(GOOD)),
        calls(family, ("shell", {"a": "b"})),
    )
    tags = [piece for call in (bad, other) for piece in re.split(r"(?=<)|(?<=>)", call) if piece]
    words = ["patch", "shell", "pat", "ch", "a", " ", "\n", "{", '"', "+a\n", "-b\n", "```json", BAD, GOOD]
    objects = ['{"name": "patch", "arguments": {"input": "-"}}', "<think>", "</think>"]
    return [*family.pieces, bad, good, other, *tags, *words, *objects]


def a_reply(world: World, grammar: CompiledGrammar, pieces: Sequence[str], chance: random.Random) -> str:
    """The longest complete reply that the grammar allows on a random walk among pieces, some of them cut."""
    matcher = grammar.start(SamplingParams()).matcher
    reply = whole = ""
    for _ in range(chance.randrange(5, 50)):
        piece = chance.choice(pieces)
        if chance.random() < 0.2:
            piece = piece[chance.randrange(len(piece)) :][: chance.randrange(1, len(piece) + 1)]
        token_ids = world.encode(piece, in_letters=chance.random() < 0.3)
        if matcher.validate_tokens(token_ids) == len(token_ids):
            assert matcher.consume_tokens(token_ids), matcher.get_error()
            reply += piece
            whole = reply if matcher.is_accepting() else whole
    assert not matcher.is_error(), matcher.get_error()
    return whole


def what_is_read(
    family: Family, tags: ThinkTags | None, pieces: Sequence[str]
) -> tuple[list[list[str]], str]:
    """Names and arguments of the calls that the format's parser finds, and the reasoning."""
    parser = reply_format(family, tags).parser(TOOLS, PROMPT)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    found: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            call = found.setdefault(delta.index, ["", ""])
            call[0] += delta.name or ""
            call[1] += delta.arguments
    return list(found.values()), "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))


@pytest.mark.parametrize("tags", [None, THINK], ids=["plain", "thinks"])
@pytest.mark.parametrize("family", RAW, ids=lambda family: family.name)
def test_what_is_allowed_is_read_as_a_text_that_follows(
    world: World, family: Family, tags: ThinkTags | None
) -> None:
    """In any reply that the grammar allows, each call of the tool that the parser finds has one argument that
    follows its grammar; any cuts give the same."""
    grammar, chance, pieces = world.grammar(family, tags), random.Random(7), pieces_of(family)
    num_read = 0
    for _ in range(300):
        reply = a_reply(world, grammar, pieces, chance)
        found, reasoning = what_is_read(family, tags, [reply])
        cuts = sorted(chance.randrange(len(reply) + 1) for _ in range(6))
        parts = [reply[start:end] for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
        assert what_is_read(family, tags, parts) == (found, reasoning)
        for name, arguments in found:
            if name == "patch":
                [(parameter, text)] = json.loads(arguments).items()
                assert parameter == "input"
                assert FOLLOWS.fullmatch(text), reply
                num_read += 1
    assert num_read > 8


def test_it_does_not_where_text_is_quoted(world: World) -> None:
    hermes = ReplyFormat.choose("hermes", "none", None)
    assert not hermes.enforces_texts
    start = ReplyStart(hermes, world.tokenizer.added_tokens, "")
    assert free_texts(TOOLS, {"patch": Text()}, True, start) is None


def test_a_strict_call_that_ends_reasoning_keeps_its_schema(tmp_path: Path) -> None:
    """DeepSeek's token begins a call anywhere, also in unclosed reasoning, and the schema holds."""
    tokens = [tag for tag in TOOL_FORMATS["deepseek_v31"].tags if tag]
    world = World(folder_with_tokens(tmp_path, tokens))
    schema = {"type": "object", "properties": {"line": {"type": "integer"}}, "required": ["line"]}
    tool = {"type": "function", "function": {"name": "edit", "strict": True, "parameters": schema}}
    grammar = free_calls(
        [tool], True, ReplyStart(reply_format(DEEPSEEK_V31, THINK), world.tokenizer.added_tokens, PROMPT)
    )
    assert grammar is not None
    compiled = world.backend.compile(grammar.params)
    for before in ("I edit", "I edit.</think>\n\nSo:"):
        for arguments, follows in (({"line": 7}, True), ({"line": "seven"}, False)):
            call = DEEPSEEK_V31.render("", [("edit", arguments)]).removesuffix(DEEPSEEK_V31.stop)
            assert world.accepts(compiled, before + call) is follows, (before, arguments)
    assert not world.accepts(compiled, f"I edit{call}</think>")
