"""Promises of the grammars for forced calls: they are the model's own syntax, and nothing but calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import ModelConfig
from engine.sampling_params import SamplingParams
from engine.structured_output.backend import GrammarBackend, TokenTable
from engine.structured_output.params import StructuredOutputsParams, ToolArguments
from engine.tokenization.tokenizer import Tokenizer
from engine.tool_parsers.catalog import TOOL_FORMATS
from engine.tool_parsers.forced import CallGrammar
from engine.tool_parsers.formats import ReplyFormat
from engine.worker.loading.tiny_models import make_model_folder
from tests.tool_parsers.families import FAMILIES, GLM47, MISTRAL_BARE, TOOLS, Family

OTHER_SPELLINGS = [MISTRAL_BARE, GLM47]
FORCEABLE = [
    family
    for family in FAMILIES
    if family not in OTHER_SPELLINGS and TOOL_FORMATS[family.name].syntax is not None
]


class Follower:
    """Follows texts through grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = GrammarBackend(TokenTable.of(tokenizer, len(tokenizer.hf)))

    def accepts(self, grammar: CallGrammar, text: str, texts: list[str] | None = None) -> bool:
        """Whether the whole text is one that the grammar allows; ``texts``: those that it refers to."""
        arguments = [ToolArguments(each.function, each.schema, each.strict) for each in grammar.arguments]
        compiled = self._backend.compile(
            StructuredOutputsParams(grammar=grammar.rules, arguments=arguments, texts=texts)
        )
        follower = compiled.start(SamplingParams())
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return all(follower.accept(token_id) for token_id in token_ids) and follower.matcher.is_accepting()


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")
    return Follower(Tokenizer.load(ModelConfig(model=str(folder))))


def without_ids(text: str) -> str:
    """Mistral's template writes the client's ids into its history; the model need not make up any."""
    return text.replace(', "id": "abcdefghi"', "")


@pytest.mark.parametrize("family", FORCEABLE, ids=lambda family: f"{family.name}")
def test_what_the_template_writes_is_what_is_forced(follower: Follower, family: Family) -> None:
    """The calls as the model was taught to write them follow the grammar; one call only, if one is wanted."""
    reply_format = ReplyFormat.choose(family.name, "none", None, follower.tokenizer.added_tokens)
    several = reply_format.forced_call_grammar(TOOLS, True, "")
    single = reply_format.forced_call_grammar(TOOLS, False, "")
    assert several is not None
    assert single is not None
    call = ("bash", {"command": "ls -l 'é'", "seconds": 5})
    one, two = (
        without_ids(family.render("", [call])),
        without_ids(family.render("", [call, ("get.time", {})])),
    )
    assert follower.accepts(several, two)
    assert follower.accepts(several, one)
    assert follower.accepts(single, one)
    assert not follower.accepts(single, two)
    assert not follower.accepts(several, "Let me look. " + one)
    assert not follower.accepts(several, family.render("", [("other", {})]))


PATCH = 'start: "*** Begin" LF line+ "*** End" LF?\nline: "+" /(.*)/ LF\nLF: /\\n/\n'
GOOD, BAD = '*** Begin\n+say("é")</parameter>\n*** End', "*** Begin\n-a\n*** End"


def a_call(name: str, text: str) -> str:
    return (
        f"<tool_call>\n<function={name}>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    ("reply", "follows"),
    [
        ("Only text, of a <b> and so on.", True),
        (a_call("patch", GOOD), True),
        (f"Look:\n\n{a_call('patch', GOOD)}\n", True),
        (a_call("patch", GOOD + "\n"), True),
        (f"{a_call('shell', BAD)}\n{a_call('patch', GOOD)}", True),
        (a_call("patch", BAD), False),
        (f"{a_call('shell', 'x')}\n{a_call('patch', BAD)}", False),
        (a_call("another", GOOD), False),
        (a_call("patch", BAD).removeprefix("<tool_call>\n"), False),
        (a_call("patch", GOOD).replace("=input", "=text"), False),
    ],
)
def test_a_text_follows_its_grammar_where_the_model_may_choose(
    follower: Follower, reply: str, follows: bool
) -> None:
    """Qwen3-Coder writes it as it is; what else it says, and other calls, follow none."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("patch", "shell")]
    added = follower.tokenizer.added_tokens
    in_tokens = replace(ReplyFormat.choose("qwen3_coder", "none", None), special_tokens=added)
    rules = in_tokens.free_text_grammar(tools, {"patch": "input"}, parallel=True)
    assert rules is not None
    assert follower.accepts(CallGrammar(rules, []), reply, [PATCH]) is follows


def test_it_does_not_where_text_is_quoted_or_no_token_begins_a_call(follower: Follower) -> None:
    tools = [{"type": "function", "function": {"name": "patch"}}]
    for name, added in (("hermes", follower.tokenizer.added_tokens), ("qwen3_coder", {}), ("seed_oss", {})):
        in_tokens = replace(ReplyFormat.choose(name, "none", None), special_tokens=added)
        assert in_tokens.free_text_grammar(tools, {"patch": "input"}, parallel=True) is None
        assert not in_tokens.enforces_texts(added)
