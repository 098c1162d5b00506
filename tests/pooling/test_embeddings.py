"""Promises of ``LLM.embed``: an embedding is sentence-transformers' own, however the model is run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from engine.errors import ConfigError, ContextLengthError, EngineGenerateError, ModelLoadError, RequestError
from engine.frontend.llm import LLM
from engine.records.pooling import PoolingParams
from tests.pooling.pooling_folders import TEXTS, make_decoder, make_encoder, save_embedder, set_field

Array = npt.NDArray[np.float32]
ROUNDING = 5e-6
"""Rounding of fp32 sums in another order."""
DECODERS: dict[str, dict[str, Any]] = {
    "qwen3-lasttoken": {"family": "qwen3", "mode": "lasttoken"},
    "llama-mean": {"family": "llama", "mode": "mean"},
    "qwen2-weightedmean-dense": {"family": "qwen2", "mode": "weightedmean", "dense": 24},
    "mistral-cls-and-max": {"family": "mistral", "mode": ("cls", "max"), "normalizes": False},
    "gemma3-lasttoken-in-chat": {"family": "gemma3_text", "mode": "lasttoken", "in_chat": True},
    "gemma3-mean-both-ways": {
        "family": "gemma3_text",
        "mode": "mean",
        "extra_config": {"use_bidirectional_attention": True},
    },
    "qwen3_moe-sqrt": {"family": "qwen3_moe", "mode": "mean_sqrt_len_tokens"},
    "qwen3_next-lasttoken": {"family": "qwen3_next", "mode": "lasttoken", "num_layers": 4},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert-mean-dense": {"family": "bert", "mode": "mean", "dense": 16},
    "bert-cls": {"family": "bert", "mode": "cls", "normalizes": False},
    "roberta-max-and-mean": {"family": "roberta", "mode": ("max", "mean")},
    "distilbert-mean": {"family": "distilbert", "mode": "mean"},
    "modernbert-cls": {"family": "modernbert", "mode": "cls"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that makes the folder of a case once."""
    root = tmp_path_factory.mktemp("embedders")

    @cache
    def made(name: str) -> Path:
        options = dict({**DECODERS, **ENCODERS}[name])
        make = make_encoder if name in ENCODERS else make_decoder
        sizes = {each: options.pop(each) for each in ("num_layers", "extra_config") if each in options}
        source = make(root / f"{name}-plain", options.pop("family"), **sizes)
        return save_embedder(root / name, source, options.pop("mode"), **options)

    return made


@contextmanager
def embedder(folder: Path, **options: Any) -> Iterator[LLM]:
    options = {"multiprocess": False, "kv_cache_memory_bytes": 2**27, "max_model_len": 400, **options}
    if "bert" in folder.name:
        del options["max_model_len"]
    with LLM(folder, **options) as llm:
        yield llm


def embeddings(llm: LLM, texts: Sequence[str] = TEXTS, **options: Any) -> Array:
    outputs = llm.embed(list(texts), use_tqdm=False, **options)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def own(folder: Path, texts: Sequence[str] = TEXTS, **options: Any) -> Array:
    model = SentenceTransformer(str(folder), device="cpu")
    found: Array = model.encode(list(texts), **options)
    return found


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_an_embedding_is_that_of_sentence_transformers(folders: Any, name: str) -> None:
    """Embeddings are the same for prompts of several steps and for all lengths in one step."""
    folder = folders(name)
    # Encoders have a short context, and transformers scans states in slow Python without a kernel.
    limit = 350 if name in ENCODERS else 100 if name == "qwen3_next-lasttoken" else None
    texts = [text[:limit] for text in TEXTS]
    with embedder(folder, max_num_batched_tokens=48) as llm:
        found = embeddings(llm, texts)
        again = embeddings(llm, texts[::-1])[::-1]
    expected = own(folder, texts)
    assert found == pytest.approx(expected, abs=ROUNDING * max(1.0, float(np.abs(expected).max())))
    assert again == pytest.approx(found, abs=ROUNDING * max(1.0, float(np.abs(expected).max())))
    assert np.abs(expected[0] - expected[1]).max() > 0.01, "the texts differ"


def test_prompts_that_begin_alike_are_computed_once(folders: Any) -> None:
    """Prefixes are reused where only the last token is pooled; otherwise all tokens are computed."""
    for name, hits in (("qwen3-lasttoken", True), ("llama-mean", False)):
        long = TEXTS[-1]
        with embedder(folders(name)) as llm:
            llm.encode(long, use_tqdm=False)
            [second] = llm.encode(long + "More of it.", use_tqdm=False)
        assert (second.num_cached_tokens > 100) is hits
        [expected] = own(folders(name), [long + "More of it."])
        assert second.outputs.data == pytest.approx(expected, abs=ROUNDING)


def test_every_token_has_a_vector_if_asked(folders: Any) -> None:
    """Each token has transformers' vector, also after a cached prefix."""
    folder = folders("qwen3-lasttoken")
    model = SentenceTransformer(str(folder), device="cpu")
    expected: Any = model.encode(list(TEXTS), output_value="token_embeddings", convert_to_numpy=False)
    with embedder(folder, max_num_batched_tokens=64) as llm:
        embeddings(llm)
        found = llm.encode(list(TEXTS), pooling_task="token_embed", use_tqdm=False)
    for one, rows in zip(found, expected, strict=True):
        rows = torch.nn.functional.normalize(rows, dim=-1)
        assert one.outputs.data == pytest.approx(rows.numpy(), abs=ROUNDING)


def test_compiled_steps_are_close(tmp_path: Path) -> None:
    """In bf16, with sizes that the kernels support, embeddings are close to sentence-transformers'."""
    source = make_decoder(tmp_path / "plain", "qwen3", dtype="bfloat16", head_dim=64, hidden_size=128)
    folder = save_embedder(tmp_path / "whole", source, ("lasttoken", "mean"))
    with embedder(folder, dtype="bfloat16") as llm:
        found = embeddings(llm)
    expected = own(folder)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)  # rounded to bf16
    assert (found * expected).sum(axis=-1) == pytest.approx(np.ones(len(TEXTS)), abs=2e-3)


def test_two_ranks_and_a_host_tier_change_nothing(folders: Any) -> None:
    folder = folders("qwen3-lasttoken")
    expected = own(folder)
    for options in (
        {"tensor_parallel_size": 2, "multiprocess": True},
        {"num_host_blocks_override": 64, "num_gpu_blocks_override": 30},
    ):
        with embedder(folder, **options) as llm:
            assert embeddings(llm) == pytest.approx(expected, abs=ROUNDING)
            assert embeddings(llm) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-lasttoken", "llama-mean"])
def test_two_stages_change_nothing(folders: Any, name: str) -> None:
    """Two stages give the same embeddings in chunks, with several steps in flight."""
    stages = {"pipeline_parallel_size": 2, "multiprocess": True, "max_num_batched_tokens": 48}
    expected = own(folders(name))
    with embedder(folders(name), **stages) as llm:
        for _ in range(2):
            assert embeddings(llm) == pytest.approx(expected, abs=ROUNDING)


def test_embeddings_are_cut_and_normalized_again(folders: Any) -> None:
    folder = folders("qwen3-lasttoken")
    expected = own(folder)[:, :16]
    with embedder(folder) as llm:
        found = embeddings(llm, pooling_params=PoolingParams(dimensions=16))
        raw = embeddings(llm, pooling_params=PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="dimensions must be from 1 to 64, got 65"):
            embeddings(llm, pooling_params=PoolingParams(dimensions=65))
    lengths = np.linalg.norm(expected, axis=-1, keepdims=True)
    assert found == pytest.approx(expected / lengths, abs=ROUNDING)
    assert np.linalg.norm(raw, axis=-1) != pytest.approx(np.ones(len(TEXTS)), abs=0.1)


def test_a_config_may_name_the_lengths(folders: Any, tmp_path: Path) -> None:
    source = make_encoder(tmp_path / "bert")
    set_field(source, "config.json", matryoshka_dimensions=[8, 16])
    with embedder(source) as llm:
        assert embeddings(llm, pooling_params=PoolingParams(dimensions=8)).shape == (len(TEXTS), 8)
        with pytest.raises(RequestError, match="dimensions must be one of 8, 16"):
            embeddings(llm, pooling_params=PoolingParams(dimensions=12))


def test_texts_before_an_input_are_named_in_the_folder(tmp_path: Path) -> None:
    prompts = {"query": "Find what answers: ", "document": "passage: "}
    source = make_encoder(tmp_path / "plain")
    folder = save_embedder(tmp_path / "bert", source, prompts=prompts, default_prompt_name="document")
    with embedder(folder) as llm:
        plain = embeddings(llm, truncate_prompt_tokens=-1)
        queries = embeddings(llm, truncate_prompt_tokens=-1, prompt_name="query")
        with pytest.raises(RequestError, match="prompt_name must be one of document, query"):
            embeddings(llm, prompt_name="title")
    assert plain == pytest.approx(own(folder), abs=ROUNDING)
    assert queries == pytest.approx(own(folder, prompt_name="query"), abs=ROUNDING)


def test_long_inputs_are_refused_or_cut(tmp_path: Path) -> None:
    """Long inputs are refused, or truncated as sentence-transformers does, special tokens included."""
    source = make_encoder(tmp_path / "plain")
    folder = save_embedder(tmp_path / "bert", source)
    set_field(folder, "sentence_bert_config.json", max_seq_length=20)
    with embedder(folder) as llm:
        assert llm.engine.ready.max_model_len == 20
        with pytest.raises(ContextLengthError, match="maximum context length is 20 tokens"):
            embeddings(llm)
        found = embeddings(llm, truncate_prompt_tokens=-1)
        with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1 or from 1 to 20"):
            embeddings(llm, truncate_prompt_tokens=21)
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 20
    assert found == pytest.approx(model.encode(list(TEXTS)), abs=ROUNDING)


def test_a_folder_may_be_meant_for_less_than_the_model_takes(folders: Any, tmp_path: Path) -> None:
    """A folder may lower the model's length limit but not raise it."""
    source = make_decoder(tmp_path / "plain")
    folder = save_embedder(tmp_path / "whole", source, "lasttoken")
    for longest, expected in ((64, 64), (10**6, 4096)):
        set_field(folder, "sentence_bert_config.json", max_seq_length=longest)
        with LLM(folder, multiprocess=False, kv_cache_memory_bytes=2**27) as llm:
            assert llm.engine.ready.max_model_len == expected
            found = embeddings(llm, TEXTS[:3])
        assert found == pytest.approx(own(folder, TEXTS[:3]), abs=ROUNDING)


def test_what_a_model_does_is_said_to_who_asks_for_something_else(folders: Any, model_folder: Path) -> None:
    with embedder(folders("qwen3-lasttoken")) as llm:
        with pytest.raises(RequestError, match="does not generate text"):
            llm.generate("Hello", use_tqdm=False)
        with pytest.raises(RequestError, match="task must be one of embed, token_embed, got 'classify'"):
            llm.classify("Hello", use_tqdm=False)
        with pytest.raises(RequestError, match="A prompt is a text or a list of token ids, got dict"):
            llm.embed(["Hello", {"prompt": "Hello"}], use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="dimensions must be from 1 to"):
            llm.score("Hello", "Bye", pooling_params=PoolingParams(dimensions=10**6), use_tqdm=False)
    with embedder(model_folder) as llm, pytest.raises(RequestError, match="This model generates text"):
        llm.embed("Hello", use_tqdm=False)


def test_a_generating_model_pools_if_it_is_told_to(model_folder: Path) -> None:
    """``runner`` decides whether a generating model pools or generates."""
    with embedder(model_folder, runner="pooling", pooler_config={"pooling_type": "MEAN"}) as llm:
        assert np.linalg.norm(embeddings(llm), axis=-1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)
    with embedder(model_folder, runner="generate") as llm:
        assert llm.generate("Hello", use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"runner": "pool"}, ConfigError, "runner must be one of auto, generate, pooling"),
        ({"pooler_config": "{"}, ConfigError, "pooler_config is not valid JSON"),
        ({"pooler_config": {"pooling_type": "SUM"}}, ConfigError, "pooling_type must be one of"),
        ({"pooler_config": {"step_tag_id": 1}}, ConfigError, "pooler_config has no field 'step_tag_id'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, ConfigError, "spec"),
        ({"load_format": "dummy"}, ConfigError, "load_format dummy is not supported for a model that pools"),
    ],
)
def test_options_that_do_not_fit_are_named(
    folders: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(folders("qwen3-lasttoken"), multiprocess=False, **options)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "sum"}, "Pooling 'sum' is not known"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "names activation 'os.system'"),
        ("2_Dense/config.json", {"bias": True, "use_residual": True}, "use_residual"),
        ("config.json", {"auto_map": {"AutoModel": "modeling.Model"}}, "set trust_remote_code"),
    ],
)
def test_what_a_folder_asks_and_is_not_known_is_refused(
    tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    folder = save_embedder(tmp_path / "bert", make_encoder(tmp_path / "plain"), dense=8)
    set_field(folder, file, **fields)
    with pytest.raises(ModelLoadError, match=message):
        LLM(folder, multiprocess=False)


def test_modules_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "bert", make_encoder(tmp_path / "plain"))
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().replace("1_Pooling", "../plain"))
    with pytest.raises(ModelLoadError, match="is not in its folder"):
        LLM(folder, multiprocess=False)


def test_a_model_whose_numbers_are_none_fails_one_request(tmp_path: Path) -> None:
    """A prompt with a token whose embedding is NaN fails; the next prompts are embedded."""
    source = make_encoder(tmp_path / "bert")
    tensors = load_file(source / "model.safetensors")
    with LLM(source, multiprocess=False) as llm:
        [bad] = set(llm.get_tokenizer().hf.encode("!", add_special_tokens=False))
    tensors["embeddings.word_embeddings.weight"][bad] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with embedder(source) as llm:
        with pytest.raises(EngineGenerateError, match="are not finite"):
            embeddings(llm, [TEXTS[0], "pinned!"])
        assert np.isfinite(embeddings(llm, TEXTS[:2])).all()


def test_a_decoder_without_a_head_is_normalized(tmp_path: Path) -> None:
    """Without sentence-transformers' files a decoder pools its last token and normalizes, as in V1."""
    folder = make_decoder(tmp_path / "plain", "qwen3")
    model = SentenceTransformer(str(save_embedder(tmp_path / "whole", folder, "lasttoken")), device="cpu")
    expected = np.asarray(model.encode(list(TEXTS)))
    with embedder(folder) as llm:
        assert embeddings(llm) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (1, 0, 2, 3), (0, 1, 1, 3)])
def test_modules_in_another_order_are_refused(order: tuple[int, ...], tmp_path: Path) -> None:
    """Normalize before Dense, and other orders that would give another embedding, are refused."""
    folder = save_embedder(tmp_path / "bert", make_encoder(tmp_path / "plain", "bert"), dense=16)
    path = folder / "modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([modules[place] for place in order]))
    with pytest.raises(ModelLoadError, match="after"):
        LLM(folder, multiprocess=False).close()
