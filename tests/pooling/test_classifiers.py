"""Promises of ``LLM.classify`` and ``LLM.score``: classes equal transformers', scores equal
sentence-transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.frontend.pooling_inputs import longest_first
from engine.records.pooling import PoolingParams
from tests.pooling.pooling_folders import TEXTS, make_decoder, make_encoder, save_embedder, set_field

Array = npt.NDArray[np.float32]
ROUNDING = 5e-6
SHORT = [text[:300] for text in TEXTS]
QUERY = "Which blocks are evicted?"


def logits_of(folder: Path, texts: Sequence[str]) -> torch.Tensor:
    """Logits of each text alone, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.inference_mode():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


def classes(llm: LLM, texts: Sequence[str], **options: Any) -> Array:
    outputs = llm.classify(list(texts), use_tqdm=False, **options)
    return np.array([output.outputs.probs for output in outputs], np.float32)


def small(folder: Path, **options: Any) -> LLM:
    return LLM(folder, multiprocess=False, kv_cache_memory_bytes=2**25, **options)


@pytest.mark.parametrize(("family", "num_labels"), [("bert", 3), ("roberta", 2), ("qwen3", 3), ("llama", 1)])
def test_classes_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int) -> None:
    make = make_encoder if family in ("bert", "roberta") else make_decoder
    folder = make(tmp_path / "model", family, num_labels=num_labels)
    logits = logits_of(folder, SHORT)
    expected = logits.sigmoid() if num_labels == 1 else logits.softmax(dim=-1)
    with small(folder, max_num_batched_tokens=48) as llm:
        assert classes(llm, SHORT) == pytest.approx(expected.numpy(), abs=ROUNDING)
        raw = classes(llm, SHORT, pooling_params=PoolingParams(use_activation=False))
        assert raw == pytest.approx(logits.numpy(), abs=1e-4)
        with pytest.raises(RequestError, match="task must be one of classify"):
            llm.embed("Hello", use_tqdm=False)


def test_classes_that_do_not_exclude_each_other(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", num_labels=3, problem_type="multi_label_classification")
    with small(folder) as llm:
        assert classes(llm, SHORT) == pytest.approx(logits_of(folder, SHORT).sigmoid().numpy(), abs=ROUNDING)


def test_each_token_of_a_decoder_has_classes(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model", num_labels=3)
    with small(folder) as llm:
        [each] = llm.encode(SHORT[0], pooling_task="token_classify", use_tqdm=False)
        [last] = llm.classify(SHORT[0], use_tqdm=False)
    assert each.outputs.data.shape == (len(each.prompt_token_ids), 3)
    assert each.outputs.data[-1] == pytest.approx(last.outputs.probs, abs=ROUNDING)


@pytest.mark.parametrize("family", ["bert", "roberta", "qwen3"])
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, family: str) -> None:
    """Scores equal those of a cross-encoder, which reads both texts together, with token types for BERT."""
    make = make_decoder if family == "qwen3" else make_encoder
    folder = make(tmp_path / "model", family, num_labels=1)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # with it, texts would have roles
    model = CrossEncoder(str(folder), device="cpu")
    expected = model.predict([(QUERY, text) for text in SHORT], batch_size=1)
    with small(folder) as llm:
        scores = [one.outputs.score for one in llm.score(QUERY, SHORT, use_tqdm=False)]
        swapped = [one.outputs.score for one in llm.score(SHORT[:1], QUERY, use_tqdm=False)]
    assert scores == pytest.approx(expected.tolist(), abs=ROUNDING)
    assert swapped[0] != scores[0]


def test_an_activation_is_the_folders(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", num_labels=1)
    set_field(
        folder, "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    )
    expected = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in SHORT])
    with small(folder) as llm:
        scores = [one.outputs.score for one in llm.score(QUERY, SHORT, use_tqdm=False)]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("limit", [16, 17, 40])
def test_pairs_are_cut_where_they_are_longest(tmp_path: Path, limit: int) -> None:
    folder = make_encoder(tmp_path / "model", num_labels=1)
    pairs = [(QUERY, SHORT[4]), (SHORT[4], QUERY), (SHORT[4], SHORT[2])]
    model = CrossEncoder(str(folder), device="cpu", max_length=limit)
    expected = model.predict(pairs, batch_size=1)
    with small(folder) as llm:
        firsts, seconds = [list(texts) for texts in zip(*pairs, strict=True)]
        found = llm.score(firsts, seconds, truncate_prompt_tokens=limit, use_tqdm=False)
    assert [len(one.prompt_token_ids) for one in found] == [limit] * 3
    assert [one.outputs.score for one in found] == pytest.approx(expected.tolist(), abs=ROUNDING)


def test_shares_of_a_limit_add_up() -> None:
    for first in range(12):
        for second in range(12):
            for limit in range(1, 24):
                left = longest_first(first, second, limit)
                assert sum(left) == min(limit, first + second)
                assert left[0] <= first
                assert left[1] <= second


def test_scores_of_embeddings_are_cosines(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "whole", make_encoder(tmp_path / "plain"), normalizes=False)
    model = SentenceTransformer(str(folder), device="cpu")
    expected: Any = model.similarity(model.encode([QUERY]), model.encode(SHORT))[0]
    with small(folder) as llm:
        scores = [one.outputs.score for one in llm.score(QUERY, SHORT, use_tqdm=False)]
    assert scores == pytest.approx(expected.tolist(), abs=ROUNDING)


def test_what_has_no_score_is_said(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", num_labels=3)
    with small(folder) as llm:
        with pytest.raises(RequestError, match="has 3 classes; scores need"):
            llm.score(QUERY, SHORT)
        with pytest.raises(RequestError, match="data_1 needs one text or as many as data_2, got 2 and 5"):
            llm.score(SHORT[:2], SHORT)
        with pytest.raises(RequestError, match="must not be empty"):
            llm.score(QUERY, [])
