"""Promises of the grammars for forced calls: they are the model's own syntax, and nothing but calls."""

from __future__ import annotations

import pytest

from engine.config.engine_config import ModelConfig
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams, ToolArguments
from engine.structured_output.backend import GrammarBackend, TokenTable
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
    """Checks texts against grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = GrammarBackend(TokenTable.of(tokenizer, len(tokenizer.hf)))

    def accepts(self, grammar: CallGrammar, text: str) -> bool:
        """Whether the grammar allows the whole text."""
        arguments = [ToolArguments(each.function, each.schema, each.strict) for each in grammar.arguments]
        compiled = self._backend.compile(StructuredOutputsParams(grammar=grammar.rules, arguments=arguments))
        follower = compiled.start(SamplingParams())
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return all(follower.accept(token_id) for token_id in token_ids) and follower.matcher.is_accepting()


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")
    return Follower(Tokenizer.load(ModelConfig(model=str(folder))))


def without_ids(text: str) -> str:
    """Removes ids: Mistral's template writes the client's ids, which the model need not generate."""
    return text.replace(', "id": "abcdefghi"', "")


@pytest.mark.parametrize("family", FORCEABLE, ids=lambda family: f"{family.name}")
def test_what_the_template_writes_is_what_is_forced(follower: Follower, family: Family) -> None:
    """Calls in the model's own syntax follow the grammar; without parallel calls only one does."""
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
