"""Promises of rerankers that are language models: a score is that of the model card's formula, and of
sentence-transformers' ``LogitScore``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Transformer
from transformers import AutoModelForCausalLM, AutoTokenizer

from continuum.cli.main import main
from engine.errors import ConfigError, ModelLoadError, RequestError
from engine.frontend.llm import LLM
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.pooling.pooling_folders import TEXTS, make_decoder, make_encoder, set_field

ROUNDING = 5e-6
QUERY = "Which blocks are evicted?"
SHORT = [text[:300] for text in TEXTS]
NO, YES = "raise", "value"
"""Two tokens of the small models' vocabulary that replace no and yes."""
TWO_WAY: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": [NO, YES],
    "is_original_qwen3_reranker": True,
}
BEFORE = 'Judge. Answer only "yes" or "no".\n<Instruct>: '
INSTRUCTION = "Given a web search query, retrieve relevant passages"
AFTER = "\n<think>\n\n</think>\n\n"
TEMPLATE = (
    BEFORE
    + "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('"
    + INSTRUCTION
    + "') }}\n<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    + "\n<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    + "{{ '"
    + AFTER.replace("\n", "\\n")
    + "' }}"
)
"""A template as in V1's examples; jinja would remove the last line break."""


def formatted(document: str, instruction: str = INSTRUCTION) -> str:
    """Formats a pair as the model card's program does."""
    return f"{BEFORE}{instruction}\n<Query>: {QUERY}\n<Document>: {document}{AFTER}"


def cards_probs(folder: Path, texts: list[str]) -> list[list[float]]:
    """The softmax of the logits of no and yes after each text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = tokenizer.convert_tokens_to_ids([NO, YES])
    probs = []
    with torch.inference_mode():
        for text in texts:
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1, rows]
            probs.append([float(prob) for prob in logits.softmax(-1)])
    return probs


def cards_scores(folder: Path, texts: list[str]) -> list[float]:
    """The probability of yes."""
    return [yes for _, yes in cards_probs(folder, texts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("reranker") / "model")


def small(folder: Path, **options: Any) -> LLM:
    options = {"multiprocess": False, "kv_cache_memory_bytes": 2**25, "hf_overrides": TWO_WAY, **options}
    return LLM(folder, **options)


def scores_of(llm: LLM, *args: Any, **options: Any) -> list[float]:
    return [one.outputs.score for one in llm.score(*args, use_tqdm=False, **options)]


@pytest.mark.parametrize("tied", [True, False])
def test_a_score_is_that_of_the_model_card(tmp_path: Path, tied: bool) -> None:
    """V1's fields configure the score, with a template or with texts that the client has formatted."""
    folder = make_model_folder(tmp_path / "model", tie=tied)
    expected = cards_scores(folder, [formatted(text) for text in SHORT])
    with small(folder, max_num_batched_tokens=64) as llm:
        assert scores_of(llm, QUERY, SHORT, chat_template=TEMPLATE) == pytest.approx(expected, abs=ROUNDING)
        whole = [formatted(text).split("\n<Document>") for text in SHORT]
        firsts, seconds = whole[0][0], ["\n<Document>" + second for _, second in whole]
        assert scores_of(llm, firsts, seconds) == pytest.approx(expected, abs=ROUNDING)
        with pytest.raises(RequestError, match="truncate_prompt_tokens is not supported for this model"):
            llm.score(QUERY, SHORT, truncate_prompt_tokens=20, use_tqdm=False)
    assert max(expected) - min(expected) > 1e-3, "the texts differ"


def test_tokens_may_be_classes_of_their_own(folder: Path) -> None:
    """With ``no_post_processing`` each of the tokens is a class."""
    overrides = {"classifier_from_token": [NO, YES], "method": "no_post_processing"}
    expected = cards_probs(folder, SHORT)
    with small(folder, hf_overrides=overrides) as llm:
        found = [one.outputs.probs for one in llm.classify(SHORT, use_tqdm=False)]
        with pytest.raises(RequestError, match="has 2 classes; scores need"):
            llm.score(QUERY, SHORT, use_tqdm=False)
    assert found == [pytest.approx(each, abs=ROUNDING) for each in expected]


@pytest.mark.slow
def test_two_ranks_score_alike(folder: Path) -> None:
    expected = cards_scores(folder, [formatted(text) for text in SHORT])
    with small(folder, tensor_parallel_size=2, multiprocess=True) as llm:
        assert scores_of(llm, QUERY, SHORT, chat_template=TEMPLATE) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
@pytest.mark.parametrize("one_token", [False, True])
def test_a_folder_of_sentence_transformers_says_so_itself(
    folder: Path, tmp_path: Path, activation: str, one_token: bool
) -> None:
    """The folder's ``LogitScore``, template, instruction and activation are used."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    no, yes = (tokenizer.get_vocab()[word] for word in (NO, YES))
    transformer = Transformer(str(folder), transformer_task="text-generation")
    transformer.processor.chat_template = TEMPLATE
    model = CrossEncoder(
        modules=[transformer, LogitScore(yes, None if one_token else no)],
        device="cpu",
        activation_fn=getattr(torch.nn, activation)(),
        prompts={"agents": "Find what the agent needs"},
        default_prompt_name="agents",
    )
    model.save(str(tmp_path / "saved"))
    expected = CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(
        [(QUERY, text) for text in SHORT], batch_size=1
    )
    with small(tmp_path / "saved", hf_overrides=None) as llm:
        found = scores_of(llm, QUERY, SHORT)
    assert found == pytest.approx(expected.tolist(), abs=ROUNDING)
    if not one_token and activation == "Sigmoid":
        texts = [formatted(text, "Find what the agent needs") for text in SHORT]
        assert found == pytest.approx(cards_scores(folder, texts), abs=ROUNDING)


@pytest.mark.parametrize("limit", [125, 141, 170])
def test_a_long_document_is_cut_in_its_template(folder: Path, tmp_path: Path, limit: int) -> None:
    """A long document is truncated as by sentence-transformers: the end of the template stays."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    no, yes = (tokenizer.get_vocab()[word] for word in (NO, YES))
    transformer = Transformer(str(folder), transformer_task="text-generation")
    transformer.processor.chat_template = TEMPLATE
    CrossEncoder(modules=[transformer, LogitScore(yes, no)], device="cpu").save(str(tmp_path / "saved"))
    model = CrossEncoder(str(tmp_path / "saved"), device="cpu", max_length=limit)
    expected = model.predict([(QUERY, text) for text in TEXTS], batch_size=1)
    with small(tmp_path / "saved", hf_overrides=None) as llm:
        found = llm.score(QUERY, list(TEXTS), truncate_prompt_tokens=limit, use_tqdm=False)
        lengths = [len(one.prompt_token_ids) for one in found]
        assert max(lengths) == limit
        assert lengths[3] < limit, "the short one is whole"
        assert [one.outputs.score for one in found] == pytest.approx(expected.tolist(), abs=ROUNDING)
        with pytest.raises(RequestError, match=r"more than \d+, the tokens around the document, got 20"):
            llm.score(QUERY, list(TEXTS), truncate_prompt_tokens=20, use_tqdm=False)


def test_a_classifier_may_take_pairs_in_its_template(tmp_path: Path) -> None:
    """A model converted like Qwen3-Reranker has one class and a template with roles."""
    source = make_decoder(tmp_path / "model", num_labels=1)
    model = CrossEncoder(str(source), device="cpu")
    model[0].processor.chat_template = TEMPLATE
    model.save(str(tmp_path / "saved"))
    if "message" not in model[0].modality_config:
        pytest.fail("sentence-transformers does not use the template")
    expected = CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(
        [(QUERY, text) for text in SHORT], batch_size=1
    )
    with small(tmp_path / "saved", hf_overrides=None) as llm:
        assert scores_of(llm, QUERY, SHORT) == pytest.approx(expected.tolist(), abs=ROUNDING)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = tmp_path_factory.mktemp("template") / "reranker.jinja"
    template.write_text(TEMPLATE)
    flags = ("--hf-overrides", json.dumps(TWO_WAY), "--chat-template", str(template))
    with running_server(folder, "--num-gpu-blocks-override", "400", *flags) as running:
        yield running.url
        assert running.interrupt() == 0


@pytest.mark.slow
def test_documents_are_ranked_over_http(server: str, folder: Path) -> None:
    """A server with V1's flags ranks documents for Cohere's and Jina's clients."""
    expected = cards_scores(folder, [formatted(text) for text in SHORT])
    ranked = httpx.post(f"{server}/v1/rerank", json={"query": QUERY, "documents": SHORT}, timeout=60).json()
    best = sorted(range(len(SHORT)), key=lambda number: -expected[number])
    assert [one["index"] for one in ranked["results"]] == best
    found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    assert [found[number] for number in range(len(SHORT))] == pytest.approx(expected, abs=ROUNDING)
    scored = httpx.post(f"{server}/score", json={"queries": QUERY, "documents": SHORT}, timeout=60).json()
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.slow
def test_long_documents_are_cut_over_http(server: str) -> None:
    body = {"query": QUERY, "documents": list(TEXTS), "truncate_prompt_tokens": 150}
    answer = httpx.post(f"{server}/rerank", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] <= 5 * 150
    answer = httpx.post(f"{server}/rerank", json={**body, "truncate_prompt_tokens": 20}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {}}, "hf_overrides must not set 'rope_scaling'; it takes architectures"),
        ({"architectures": ["X"]}, "hf_overrides needs classifier_from_token"),
        ({**TWO_WAY, "architectures": ["Qwen3ForCausalLM"]}, "must be one name that ends in"),
        ({**TWO_WAY, "classifier_from_token": [YES]}, "must be two tokens for from_2_way_softmax, got 1"),
        ({"classifier_from_token": [YES]}, "method must be one of from_2_way_softmax, no_post"),
        ("{", "hf_overrides must be a JSON object"),
    ],
)
def test_overrides_that_say_something_else_are_named(folder: Path, overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(folder, hf_overrides=overrides)


def test_what_cannot_be_scored_by_tokens_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'maybe so' is not a token of this model"):
        small(folder, hf_overrides={**TWO_WAY, "classifier_from_token": [NO, "maybe so"]})
    with pytest.raises(ConfigError, match="needs native code"):
        small(make_encoder(tmp_path / "bert"))
    gemma = make_model_folder(tmp_path / "gemma", "gemma2")
    with pytest.raises(ModelLoadError, match="caps or divides its logits"):
        small(gemma)
    with pytest.raises(ConfigError, match="hf_overrides and runner 'generate' cannot be combined"):
        small(folder, runner="generate")
    with small(folder) as llm, pytest.raises(RequestError, match="with the roles query and document"):
        llm.score(QUERY, SHORT, chat_template="{{ messages[0].content }}", use_tqdm=False)


@pytest.mark.slow
def test_a_template_without_the_roles_ends_the_start(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--hf-overrides", json.dumps(TWO_WAY), "--chat-template", "{{ messages[0].content }}"]
    assert main(["serve", str(folder), "--port", "0", "--num-gpu-blocks-override", "300", *flags]) != 0
    assert "with the roles query and document" in capfd.readouterr().err


def test_a_score_of_a_folder_is_checked(folder: Path, tmp_path: Path) -> None:
    transformer = Transformer(str(folder), transformer_task="text-generation")
    CrossEncoder(modules=[transformer, LogitScore(5)], device="cpu").save(str(tmp_path / "saved"))
    [scoring] = (tmp_path / "saved").glob("*LogitScore*")
    set_field(scoring, "config.json", true_token_id="yes")
    with pytest.raises(ModelLoadError, match="needs true_token_id"):
        small(tmp_path / "saved", hf_overrides=None)
    set_field(scoring, "config.json", true_token_id=10**6)
    with pytest.raises(ModelLoadError, match="1000000 is not a token of this model"):
        small(tmp_path / "saved", hf_overrides=None)
