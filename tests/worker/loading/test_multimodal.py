"""Folders with a text decoder and a vision or audio tower, compared with transformers' whole models."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.loader import load_model
from engine.worker.loading.text_decoder import MULTIMODAL_TYPES, decoder_name
from engine.worker.models.decoder import Decoder
from tests.api.server import running_server
from tests.audio.audio_folders import CONFIGS as AUDIO_CONFIGS
from tests.worker.conftest import ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.loading.multimodal_folders import (
    CONFIGS,
    MISTRAL3_DECODERS,
    code_of,
    make_multimodal_folder,
    renamed,
)
from tests.worker.loading.quantized_folders import WRITERS, write_quantized

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = random_tokens(40, seed=1)
SIZES: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 60}


class Multimodal(Protocol):
    """Returns the folder of a model type, made once."""

    def __call__(self, model_type: str) -> Path: ...


@pytest.fixture(scope="module")
def multimodal(model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory) -> Multimodal:
    base, made = tmp_path_factory.mktemp("multimodal"), dict[str, Path]()

    def folder_of(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = make_multimodal_folder(base / model_type, model_type, model_folders("llama"))
        return made[model_type]

    return folder_of


def generated(folder: Path, **options: Any) -> list[int]:
    with LLM(str(folder), multiprocess=False, **SIZES, **options) as llm:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def expected(folder: Path) -> list[int]:
    return Reference(folder, code=code_of(folder)).greedy(PROMPT, 12)


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_text_is_continued_as_by_the_whole_model(
    model_type: str, multimodal: Multimodal, caplog: pytest.LogCaptureFixture
) -> None:
    """Native code continues the text, and a log line counts the omitted tensors."""
    folder = multimodal(model_type)
    with caplog.at_level(logging.INFO, logger="continuum.start"):
        assert generated(folder, model_impl="native") == expected(folder)
    names = load_file(folder / "model.safetensors").keys()
    own = ("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")
    num_others = sum("language_model" not in name and not name.startswith(own) for name in names)
    (line,) = [message for message in caplog.messages if "served as text" in message]
    assert num_others > 0
    assert line.endswith(f"is served as text: {num_others} tensors of its other parts are left out.")


@pytest.mark.parametrize("decoder", list(MISTRAL3_DECODERS))
def test_newer_decoders_of_mistral3_folders_run(
    decoder: str, model_folders: ModelFolders, tmp_path: Path
) -> None:
    """Ministral 3 and Mistral Small 4 are published as Mistral 3 folders."""
    text = MISTRAL3_DECODERS[decoder]
    folder = make_multimodal_folder(tmp_path / decoder, "mistral3", model_folders("llama"), text_config=text)
    assert generated(folder, model_impl="native") == expected(folder)


def test_all_known_types_are_tested() -> None:
    """The tests of Llama 4 and of models that read audio are in other files."""
    with_audio = AUDIO_CONFIGS.keys() | {"qwen2_5_omni", "qwen3_omni_moe"}
    assert CONFIGS.keys() | with_audio | {"llama4"} == MULTIMODAL_TYPES


def as_before(name: str) -> str:
    """A tensor's name in folders of transformers before 4.52."""
    name = name.replace("model.language_model.", "language_model.model.")
    return name.replace("lm_head.", "language_model.lm_head.") if name.startswith("lm_head.") else name


def as_in_memory(name: str) -> str:
    """A tensor's name in transformers' modules since 4.52."""
    name = name.replace("language_model.model.", "model.language_model.")
    return name.removeprefix("language_model.") if "lm_head" in name else name


@pytest.mark.parametrize(
    ("model_type", "name_of"),
    [("qwen3_5_moe", as_before), ("llava", as_in_memory)],
    ids=["before", "in-memory"],
)
def test_names_of_other_versions_are_known(
    model_type: str, name_of: Any, multimodal: Multimodal, tmp_path: Path
) -> None:
    folder = multimodal(model_type)
    other = renamed(folder, tmp_path / "other", name_of)
    assert load_file(other / "model.safetensors").keys() != load_file(folder / "model.safetensors").keys()
    assert generated(other) == expected(folder)


def test_a_head_in_the_checkpoint_is_used(multimodal: Multimodal, tmp_path: Path) -> None:
    """Mistral Small 3.1 has one that its config does not mention: transformers then uses it, too."""
    folder = renamed(multimodal("mistral3"), tmp_path / "with_head", str)
    weights = folder / "model.safetensors"
    head = torch.randn(512, 64, generator=torch.Generator().manual_seed(7)) / 8
    save_file(load_file(weights) | {"language_model.lm_head.weight": head}, weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    wanted = expected(folder)
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert generated(folder) == wanted != expected(multimodal("mistral3"))


def test_a_format_of_the_decoder_alone_is_read(model_folders: ModelFolders, tmp_path: Path) -> None:
    """As in Kimi-K2.5, the quantization is in ``text_config``, and names have a prefix."""
    quantized = write_quantized(model_folders("llama"), tmp_path / "alone", WRITERS["compressed-int4"]).path
    folder = renamed(quantized, tmp_path / "both", "language_model.{}".format)
    text = json.loads((folder / "config.json").read_text())
    fields = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (folder / "config.json").write_text(json.dumps(fields))
    assert generated(folder) == generated(quantized)


def test_parts_of_no_decoder_are_told_apart() -> None:
    assert decoder_name("model.language_model.norm.weight") == "model.norm.weight"
    assert decoder_name("language_model.lm_head.weight") == decoder_name("lm_head.weight") == "lm_head.weight"
    for name in ("model.visual.merger.norm.weight", "vision_tower.head.probe", "mtp.fc.weight"):
        assert decoder_name(name) is None


def test_a_decoder_that_is_not_known_is_refused(multimodal: Multimodal, tmp_path: Path) -> None:
    """An unknown decoder is refused in a sentence, before weights are read."""
    folder = renamed(multimodal("mistral3"), tmp_path / "other", str)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "stablelm"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="'Mistral3ForConditionalGeneration' cannot be served: "):
        load_model(ModelConfig(model=str(folder)))


def test_random_weights_need_none_of_the_folder(multimodal: Multimodal) -> None:
    options = ModelConfig(model=str(multimodal("qwen3_5")), load_format="dummy", device="cpu")
    assert isinstance(load_model(options).model, Decoder)


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_tokenizers_and_templates_are_ordinary(model_type: str, multimodal: Multimodal) -> None:
    """Tokenizers and templates work, whatever class transformers prefers for the model type."""
    tokenizer = Tokenizer.load(ModelConfig(model=str(multimodal(model_type))))
    chat = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert "hello" in tokenizer.decode(chat, skip_special_tokens=False)


@pytest.fixture
def with_processor_template(multimodal: Multimodal, tmp_path: Path) -> Path:
    """A folder whose chat template is in the processor's file, as transformers once wrote it."""
    folder = renamed(multimodal("gemma3"), tmp_path / "gemma3", str)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.slow
def test_a_server_answers_chats_and_refuses_images(with_processor_template: Path) -> None:
    """The server gives transformers' tokens over HTTP."""
    folder = with_processor_template
    tokenizer = Tokenizer.load(ModelConfig(model=str(folder)))
    reference = Reference(folder, code=code_of(folder))
    flags = ("--device", "cpu", "--num-gpu-blocks-override", "60", "--max-model-len", "128")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with (
        running_server(folder, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        completed = http.post("/v1/completions", json=body | {"prompt": PROMPT}).json()
        assert completed["choices"][0]["text"] == tokenizer.decode(reference.greedy(PROMPT, 8))
        chat: dict[str, Any] = body | {"messages": [{"role": "user", "content": "hello"}]}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 8
        chat["messages"] = [{"role": "user", "content": [image]}]
        refused = http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": {"a": 1}}'])
def test_a_wrong_template_of_a_processor_is_told(with_processor_template: Path, content: str) -> None:
    (with_processor_template / "chat_template.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"chat_template\.json of "):
        Tokenizer.load(ModelConfig(model=str(with_processor_template)))
