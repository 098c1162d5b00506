"""What grammars need of a tokenizer, read from its files, is what the loaded tokenizer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.config.engine_config import ModelConfig
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend import GrammarBackend, TokenTable
from engine.structured_output.token_files import table_of_files
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.tiny_models import make_model_folder

VOCAB_SIZE = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model", vocab_size=VOCAB_SIZE, weights=False)


def options(folder: Path) -> ModelConfig:
    return ModelConfig(model=str(folder))


def edit(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check_equal(folder: Path) -> None:
    found = table_of_files(options(folder), VOCAB_SIZE)
    wanted = TokenTable.of(Tokenizer.load(options(folder)), VOCAB_SIZE)
    assert found is not None
    assert found.tokenizer_json is not None
    assert wanted.tokenizer_json is not None
    assert json.loads(found.tokenizer_json) == json.loads(wanted.tokenizer_json)
    assert (found.vocab_size, found.num_tokens) == (wanted.vocab_size, wanted.num_tokens)
    assert (found.eos_token_id, found.added_tokens) == (wanted.eos_token_id, wanted.added_tokens)


def test_it_is_that_of_the_loaded_tokenizer(folder: Path) -> None:
    check_equal(folder)


def test_padding_and_truncation_are_left_out(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    check_equal(folder)


def test_more_added_tokens_are_counted(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|more|>", special=True)])
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|more|>"
    ).save_pretrained(folder)
    check_equal(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token": "<|unheard|>"},
        {"additional_special_tokens": ["<|unheard|>"]},
        {"added_tokens_decoder": {"600": {"content": "<|unheard|>"}}},
        {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}},
    ],
    ids=str,
)
def test_a_tokenizer_that_loading_would_change_is_loaded(folder: Path, fields: dict[str, Any]) -> None:
    edit(folder, "tokenizer_config.json", **fields)
    assert table_of_files(options(folder), VOCAB_SIZE) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_cannot_be_read_are_left_to_loading(name: str, folder: Path) -> None:
    (folder / name).write_text("{")
    assert table_of_files(options(folder), VOCAB_SIZE) is None
    (folder / name).unlink()
    assert table_of_files(options(folder), VOCAB_SIZE) is None
    assert table_of_files(ModelConfig(model="someone/some-model"), VOCAB_SIZE) is None


def test_grammars_compile_over_it(folder: Path) -> None:
    table = table_of_files(options(folder), VOCAB_SIZE)
    assert table is not None
    params = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    grammar = GrammarBackend(table).compile(params).start(SamplingParams(structured_outputs=params))
    eos = table.eos_token_id
    assert eos is not None
    assert not grammar.accept(eos), "an object must begin"
