"""Promises of pooling models with adapters and sleep: embeddings equal peft's and survive sleep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from engine.errors import ConfigError, RequestError
from engine.frontend.llm import LLM
from engine.records.adapters import LoRARequest
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.pooling.pooling_folders import TEXTS, make_decoder, make_encoder, save_embedder, set_field
from tests.worker.lora.made_adapters import save_adapter

# peft and today's transformers warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

Array = npt.NDArray[np.float32]
ROUNDING = 5e-6
SHORT = [text[:200] for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedder")
    return save_embedder(root / "whole", make_decoder(root / "plain"), "lasttoken")


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(folder, root / name, seed, kind=AutoModel, task_type="FEATURE_EXTRACTION")
        for seed, name in enumerate(("law", "code"))
    }


def small(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"multiprocess": False, "kv_cache_memory_bytes": 2**25, **options})


def embeddings(llm: LLM, **options: Any) -> Array:
    found = llm.embed(SHORT, use_tqdm=False, **options)
    return np.array([one.outputs.embedding for one in found], np.float32)


def own(folder: Path, adapter: Path | None = None) -> Array:
    model = SentenceTransformer(str(folder), device="cpu")
    if adapter is not None:
        transformer: Any = model[0]
        transformer.model = PeftModel.from_pretrained(transformer.model, adapter)
    found: Array = model.encode(SHORT, batch_size=1)
    return found


def test_an_embedding_with_an_adapter_is_pefts(folder: Path, adapters: dict[str, Path]) -> None:
    """Several adapters in one batch, in chunks and with equal prompts, give peft's embeddings: cached KV
    belongs to one adapter."""
    paths = [adapters["law"], None, adapters["code"]]
    asked = [
        None if path is None else LoRARequest(path.name, number, str(path))
        for number, path in enumerate(paths, 1)
    ]
    expected = [own(folder, path) for path in paths]
    with small(folder, enable_lora=True, max_loras=2, max_num_batched_tokens=48) as llm:
        for _ in range(2):
            found = llm.embed(
                [text for text in SHORT for _ in asked], lora_request=asked * len(SHORT), use_tqdm=False
            )
            for number, one in enumerate(expected):
                rows = [each.outputs.embedding for each in found[number :: len(asked)]]
                assert np.array(rows) == pytest.approx(one, abs=ROUNDING)
        with pytest.raises(RequestError, match="lora_request has 2 items for 5 prompts"):
            embeddings(llm, lora_request=asked[:2])
        scores = llm.score(SHORT[0], SHORT, lora_request=asked[0], use_tqdm=False)
    cosines = expected[0] @ expected[0][0]
    assert [one.outputs.score for one in scores] == pytest.approx(cosines.tolist(), abs=ROUNDING)
    assert np.abs(expected[0] - expected[2]).max() > 0.01, "the adapters differ"


def test_compiled_steps_are_close(tmp_path: Path) -> None:
    """In bf16, with sizes that the kernels support, embeddings are close to peft's."""
    sizes: dict[str, Any] = {"head_dim": 64, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1}
    source = make_decoder(tmp_path / "plain", dtype="bfloat16", **sizes)
    folder = save_embedder(tmp_path / "whole", source, "lasttoken")
    adapter = save_adapter(folder, tmp_path / "adapter", 5, kind=AutoModel)
    asked = [LoRARequest("tuned", 1, str(adapter)), None] * len(SHORT)
    with small(folder, enable_lora=True, dtype="bfloat16") as llm:
        found = llm.embed([text for text in SHORT for _ in "ab"], lora_request=asked, use_tqdm=False)
    for start, path in enumerate((adapter, None)):
        expected = own(folder, path)
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)  # rounded to bf16
        rows = np.array([one.outputs.embedding for one in found[start::2]])
        assert (rows * expected).sum(axis=-1) == pytest.approx(np.ones(len(SHORT)), abs=3e-3)


def test_a_reranker_may_have_an_adapter(tmp_path: Path) -> None:
    """A reranker's score with an adapter is that of peft's model by the model card's formula."""
    source = make_model_folder(tmp_path / "model")
    adapter = save_adapter(source, tmp_path / "adapter", 3)
    overrides = {"classifier_from_token": ["raise", "value"], "is_original_qwen3_reranker": True}
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [tokenizer.get_vocab()[word] for word in ("raise", "value")]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), adapter)
    expected = []
    with torch.inference_mode():
        for text in SHORT:
            logits = model(**tokenizer("Query: " + text, return_tensors="pt")).logits[0, -1, rows]
            expected.append(float(logits.softmax(-1)[1]))
    with small(source, enable_lora=True, hf_overrides=overrides) as llm:
        asked = LoRARequest("tuned", 1, str(adapter))
        found = llm.score("Query: ", SHORT, lora_request=asked, use_tqdm=False)
        plain = llm.score("Query: ", SHORT, use_tqdm=False)
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=ROUNDING)
    assert [one.outputs.score for one in plain] != pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_an_adapter_is_chosen_as_the_model(folder: Path, adapters: dict[str, Path]) -> None:
    """Over HTTP an adapter is selected by the model's name, as with generating models."""
    flags = ("--enable-lora", "--lora-modules", f"law={adapters['law']}", "--num-gpu-blocks-override", "400")
    with running_server(folder, *flags) as server:
        for name, adapter in (("law", adapters["law"]), (None, None)):
            body = {"input": SHORT, **({} if name is None else {"model": name})}
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            found = np.array([one["embedding"] for one in answer.json()["data"]])
            assert found == pytest.approx(own(folder, adapter), abs=ROUNDING)
        assert answer.json()["model"] == "tiny"
        assert server.interrupt() == 0


def test_an_encoder_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_lora is not supported for an encoder"):
        small(make_encoder(tmp_path / "bert"), enable_lora=True)


def test_it_sleeps_and_takes_other_weights(folder: Path, tmp_path: Path) -> None:
    """Embeddings survive sleep; weights with the same pooling are loaded, others refused without effect."""
    source = make_decoder(tmp_path / "plain", seed=7)
    other = save_embedder(tmp_path / "other", source, "lasttoken")
    meaned = save_embedder(tmp_path / "meaned", source, "lasttoken", dense=16)
    expected = own(folder)
    with small(folder) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert embeddings(llm) == pytest.approx(expected, abs=ROUNDING)
        with pytest.raises(RequestError, match="pools in another way than the model that is served"):
            llm.update_weights(meaned)
        assert embeddings(llm) == pytest.approx(expected, abs=ROUNDING)
        llm.update_weights(other)
        assert embeddings(llm) == pytest.approx(own(other), abs=ROUNDING)


def test_a_rerankers_row_comes_with_its_weights(tmp_path: Path) -> None:
    """New weights replace the head's rows that score, not only the layers."""
    overrides = {"classifier_from_token": ["raise", "value"], "is_original_qwen3_reranker": True}
    old = make_model_folder(tmp_path / "old")
    new = make_model_folder(tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    tensors["lm_head.weight"] *= -1.0
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    set_field(new, "config.json", _name_or_path="elsewhere")
    assert json.loads((new / "config.json").read_text())["_name_or_path"] == "elsewhere"
    with small(old, hf_overrides=overrides) as llm:
        before = [one.outputs.score for one in llm.score("Query: ", SHORT, use_tqdm=False)]
        llm.update_weights(new)
        after = [one.outputs.score for one in llm.score("Query: ", SHORT, use_tqdm=False)]
    assert after == pytest.approx([1 - score for score in before], abs=1e-5)
