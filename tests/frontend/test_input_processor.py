"""A request is checked against the model and completed before it goes to the core."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ContextLengthError, RequestError
from engine.frontend.input_processor import GenerationDefaults, InputProcessor
from engine.records.adapters import Adapter
from engine.records.kv_transfer import RemotePrefix
from engine.records.messages import EngineCoreRequest, EngineReady, JobRef, RequestContext
from engine.records.pooling import PoolingModel, PoolingParams
from engine.records.sampling_params import SamplingParams
from engine.tokenization.tokenizer import Tokenizer

READY = EngineReady(num_gpu_blocks=10, max_model_len=100, block_size=16, vocab_size=512, dtype="float32")


def process(
    tokenizer: Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    defaults: GenerationDefaults | None = None,
) -> EngineCoreRequest:
    processor = InputProcessor(tokenizer, READY, defaults or GenerationDefaults())
    return processor.process("outer", prompt, params, arrival_time=1.0)


def test_a_request_gets_an_id_of_its_own(tokenizer: Tokenizer) -> None:
    """Two requests of one name do not collide in the core; the name is kept."""
    first, second = (process(tokenizer, [1], SamplingParams()) for _ in range(2))
    assert first.request_id != second.request_id
    assert first.request_id.startswith("outer-")
    assert len(first.request_id) == len("outer-") + 8
    assert first.external_req_id == second.external_req_id == "outer"


def test_the_context_reaches_the_core_as_it_was_made(tokenizer: Tokenizer) -> None:
    """All fields of a context reach the core unchanged, also over the wire, new fields included."""
    context = RequestContext(
        job=JobRef("job", owner="ann"),
        priority=-3,
        cache_salt="salt",
        adapter=Adapter("sql", "/adapters/sql", "0a1b"),
        kv_transfer=RemotePrefix("opens it", 32, "10.0.0.1", 5600),
        pooling=PoolingParams(task="embed", dimensions=8),
    )
    assert None not in msgspec.structs.astuple(context)
    pools = msgspec.structs.replace(READY, pooling=PoolingModel(tasks=("embed",), size=64))
    processor = InputProcessor(tokenizer, pools, GenerationDefaults())
    request = processor.process("r", [1], SamplingParams(), arrival_time=1.0, context=context)
    written = msgspec.msgpack.encode(request)
    for received in (request, msgspec.msgpack.decode(written, type=EngineCoreRequest)):
        fields = {name: getattr(received, name) for name in RequestContext.__struct_fields__}
        assert RequestContext(**fields) == context


def test_a_prompt_whose_logprobs_are_told_shares_no_cache(tokenizer: Tokenizer) -> None:
    """Each request with prompt logprobs gets its own salt. It is refused where the engine cannot compute
    them, and together with transferred KV."""
    told = SamplingParams(prompt_logprobs=0)
    first, second = (process(tokenizer, [1], told) for _ in range(2))
    assert len({None, first.cache_salt, second.cache_salt}) == 3
    on_gpu = msgspec.structs.replace(READY, prompt_logprobs=False)
    processor = InputProcessor(tokenizer, on_gpu, GenerationDefaults())
    with pytest.raises(RequestError, match="needs native code of the model on a GPU"):
        processor.process("r", [1], told, arrival_time=1.0)
    fetched = RequestContext(kv_transfer=RemotePrefix("opens it", 32, "10.0.0.1", 5600))
    with pytest.raises(RequestError, match="cannot be combined with kv_transfer_params"):
        InputProcessor(tokenizer, READY, GenerationDefaults()).process(
            "r", [1], told, arrival_time=1.0, context=fetched
        )


def test_max_tokens_defaults_to_what_is_left(tokenizer: Tokenizer) -> None:
    """``max_tokens=None`` means up to the context length, or the number of replayed tokens."""
    assert process(tokenizer, [1] * 30, SamplingParams(max_tokens=None)).sampling_params.max_tokens == 70
    replay = SamplingParams(max_tokens=None, replay_token_ids=[5, 6, 7])
    assert process(tokenizer, [1] * 30, replay).sampling_params.max_tokens == 3


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "numbers"),
    [(100, None, ("100", "100")), (250, 1, ("100", "250")), (60, 41, ("100", "101")), (60, 40, None)],
)
def test_what_does_not_fit_names_both_numbers(
    tokenizer: Tokenizer, num_prompt_tokens: int, max_tokens: int | None, numbers: tuple[str, str] | None
) -> None:
    """A too long request's error has "maximum context length", for clients, the limit and the length."""
    params = SamplingParams(max_tokens=max_tokens)
    if numbers is None:
        process(tokenizer, [1] * num_prompt_tokens, params)
        return
    with pytest.raises(ContextLengthError, match="maximum context length") as caught:
        process(tokenizer, [1] * num_prompt_tokens, params)
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], SamplingParams(), "prompt"),
        ([512], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1], SamplingParams(temperature=-1), "temperature"),
        ([1], SamplingParams(stop_token_ids=[512]), "stop_token_ids"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
    ],
)
def test_an_error_names_its_field(
    tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, field: str
) -> None:
    """An error about a request names the request's field."""
    with pytest.raises(RequestError) as caught:
        process(tokenizer, prompt, params)
    assert caught.value.field == field


def test_every_eos_of_the_model_ends_a_request(tokenizer: Tokenizer) -> None:
    """All EOS tokens of a model end the output unless ignored; those beyond the vocabulary are dropped."""
    own = tokenizer.eos_token_id
    assert own is not None
    defaults = GenerationDefaults(eos_token_ids=[own, 7, 8, 99_999])
    params = process(tokenizer, [1], SamplingParams(stop_token_ids=[3]), defaults).sampling_params
    assert params.ending_token_ids == {own, 7, 8, 3}
    ignoring = process(tokenizer, [1], SamplingParams(ignore_eos=True), defaults).sampling_params
    assert ignoring.ending_token_ids == set()


def test_the_callers_parameters_are_not_changed(tokenizer: Tokenizer) -> None:
    """One SamplingParams may serve many requests."""
    params = SamplingParams(max_tokens=None, bad_words=["self"])
    completed = process(tokenizer, [1], params).sampling_params
    assert completed.bad_words_token_ids
    assert params == SamplingParams(max_tokens=None, bad_words=["self"])


def write_generation_config(model_folder: Path, folder: Path, content: object) -> ModelConfig:
    shutil.copy(model_folder / "config.json", folder)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return ModelConfig(model=str(folder))


def test_the_models_recommendations_are_the_defaults(model_folder: Path, tmp_path: Path) -> None:
    """``generation_config.json`` sets what a caller leaves open; it names one EOS or a list."""
    config = write_generation_config(
        model_folder, tmp_path, {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": [1, 2]}
    )
    defaults = GenerationDefaults.load(config)
    assert defaults.sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
    assert defaults.eos_token_ids == [1, 2]


def test_the_models_recommendations_can_be_left_out(model_folder: Path, tmp_path: Path) -> None:
    """``generation_config=vllm`` means neutral sampling; EOS still ends a text."""
    write_generation_config(model_folder, tmp_path, {"temperature": 0.6, "eos_token_id": 1})
    defaults = GenerationDefaults.load(ModelConfig(model=str(tmp_path), generation_config="vllm"))
    assert defaults.sampling_params() == SamplingParams()
    assert defaults.eos_token_ids == [1]


@pytest.mark.parametrize(("outer", "eos"), [({}, [7, 8]), ({"eos_token_id": 5}, [5])], ids=str)
def test_a_decoder_among_other_parts_may_name_its_eos(
    outer: dict[str, int], eos: list[int], tmp_path: Path
) -> None:
    """EOS is read from ``text_config`` if neither the outer config nor ``generation_config.json`` has it."""
    config = {"model_type": "mistral3", "text_config": {"eos_token_id": [7, 8]}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert GenerationDefaults.load(ModelConfig(model=str(tmp_path))).eos_token_ids == eos


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("eos_token_id", value) for value in ("258", ["258"], [1, None], -1, {"a": 1}, 1.5, True)),
        *(("temperature", value) for value in ("0.6", -1.0, [0.6], float("nan"), True)),
        *(("top_p", value) for value in (0.0, 1.5, "1")),
        *(("top_k", value) for value in (20.5, -2, "20")),
        *(("min_p", value) for value in (-0.1, 2, "0")),
        *(("max_new_tokens", value) for value in (0, -5, "100", 2.5, 10**30)),
        *(("repetition_penalty", value) for value in (-1.0, 0, "1.1", float("inf"))),
    ],
)
def test_a_wrong_generation_config_is_told_at_the_start(
    field: str, value: object, model_folder: Path, tmp_path: Path
) -> None:
    """A wrong type or range in any used field is refused with one sentence that names file and field."""
    config = write_generation_config(model_folder, tmp_path, {field: value})
    with pytest.raises(ConfigError, match=r"generation_config\.json") as caught:
        GenerationDefaults.load(config)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_generation_config_has_beside_is_nobodys(model_folder: Path, tmp_path: Path) -> None:
    """Unknown fields may hold anything and known ones null; a list instead of an object is refused."""
    content = {"do_sample": "yes", "num_beams": None, "temperature": None, "top_k": 0, "max_new_tokens": 7}
    config = write_generation_config(model_folder, tmp_path, content)
    defaults = GenerationDefaults.load(config)
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (None, 0, 7)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json of .* is not a JSON object"):
        GenerationDefaults.load(config)


def test_a_named_generation_config_must_exist(model_folder: Path, tmp_path: Path) -> None:
    """An option that names a missing file is an error, not ignored."""
    for source in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="generation_config"):
            GenerationDefaults.load(ModelConfig(model=str(model_folder), generation_config=str(source)))
