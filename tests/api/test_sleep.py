"""A sleeping server frees memory and loses no request; it can load other weights while it serves."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.records.adapters import LoRARequest
from engine.records.sampling_params import SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import Server, posting, running_server
from tests.worker.conftest import VARIANTS
from tests.worker.generation import Reference
from tests.worker.lora.made_adapters import AdaptedReference, save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

PROMPT = list(range(20, 60))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES: dict[str, Any] = {"hidden_size": 512, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2}
"""About 100 MB of weights in fp32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made = {
        name: make_model_folder(base / name, seed=seed, **SIZES) for seed, name in enumerate(("old", "new"))
    }
    return {**made, "other": make_model_folder(base / "other", seed=9)}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    return {name: Reference(folders[name]).greedy(PROMPT, 8) for name in ("old", "new")}


@pytest.fixture(scope="module")
def sleeper(folders: dict[str, Path]) -> Iterator[Server]:
    with running_server(
        folders["old"], "--num-gpu-blocks-override", "200", "--max-model-len", "512"
    ) as server:
        yield server


@pytest.fixture
def ask(sleeper: Server) -> Iterator[Callable[..., httpx.Response]]:
    with posting(sleeper) as made:
        yield made


def complete(ask: Callable[..., httpx.Response]) -> tuple[list[int], int]:
    """The tokens generated for the prompt, and how many tokens of the prompt were cached."""
    answer = ask(
        "/v1/completions", prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True
    ).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("level", [1, 2])
def test_memory_comes_back_and_what_waits_runs(
    sleeper: Server,
    ask: Callable[..., httpx.Response],
    expected: dict[str, list[int]],
    folders: dict[str, Path],
    level: int,
) -> None:
    """Only level 2 frees the weights' memory. A request that arrives meanwhile is answered after the
    wake-up."""
    assert complete(ask)[0] == expected["old"]
    before = resident_bytes(sleeper.core_pid())
    assert ask(f"/sleep?level={level}").json() == {"status": "sleeping"}
    given_back = before - resident_bytes(sleeper.core_pid())
    weights = sum(file.stat().st_size for file in folders["old"].glob("*.safetensors"))
    assert (given_back > 0.8 * weights) is (level == 2), (given_back, weights)
    assert httpx.get(f"{sleeper.url}/is_sleeping").json() == {"is_sleeping": True, "level": level}
    assert httpx.get(f"{sleeper.url}/health").status_code == 200
    answers: list[tuple[list[int], int]] = []
    waiting = threading.Thread(target=lambda: answers.append(complete(ask)))
    waiting.start()
    while not httpx.get(f"{sleeper.url}/is_paused").json()["num_waiting"]:
        pass
    assert ask("/wake_up").json() == {"status": "awake"}
    waiting.join()
    assert answers == [(expected["old"], 0)], "nothing was cached"
    assert complete(ask)[1] > 0


def test_other_weights_are_served_with_an_empty_cache(
    ask: Callable[..., httpx.Response], expected: dict[str, list[int]], folders: dict[str, Path]
) -> None:
    complete(ask)
    for name in ("new", "old"):
        assert ask("/update_weights", path=str(folders[name])).json() == {"status": "updated"}
        assert complete(ask) == (expected[name], 0)


def test_a_pause_outlasts_new_weights(
    sleeper: Server, ask: Callable[..., httpx.Response], folders: dict[str, Path]
) -> None:
    """A trainer may pause, update the weights and resume; the pause stays until then."""
    ask("/pause")
    assert ask("/update_weights", path=str(folders["old"])).status_code == 200
    assert httpx.get(f"{sleeper.url}/is_paused").json()["is_paused"]
    ask("/resume")
    assert not httpx.get(f"{sleeper.url}/is_paused").json()["is_paused"]


def test_weights_that_cannot_be_served_leave_those_before(
    ask: Callable[..., httpx.Response], expected: dict[str, list[int]], folders: dict[str, Path]
) -> None:
    """A wrong folder changes nothing, not even the cache; a folder with damaged tensors costs only the
    cache."""
    complete(ask)
    for path, message in (
        (folders["other"], "its config differs in"),
        ("/nowhere", "does not exist"),
    ):
        refused = ask("/update_weights", path=str(path))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "path"
        assert message in refused.text
        tokens, cached = complete(ask)
        assert tokens == expected["old"]
        assert cached > 0
    damaged = folders["new"].with_name("damaged")
    shutil.copytree(folders["new"], damaged)
    (damaged / "model.safetensors").write_bytes(b"nothing")
    refused = ask("/update_weights", path=str(damaged))
    assert refused.status_code == 400
    assert "cannot be served" in refused.text
    assert complete(ask) == (expected["old"], 0)


@pytest.mark.parametrize("query", ["level=3", "level=", "level=1&mode=abort"])
def test_wrong_words_are_named(ask: Callable[..., httpx.Response], query: str) -> None:
    refused = ask(f"/sleep?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in ("level", "mode")


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"multiprocess": False}], ids=str)
def test_adapters_outlast_a_sleep(folders: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    """An adapter works after a sleep and with new weights, through ``LLM`` and on several ranks."""
    adapter = save_adapter(folders["old"], tmp_path / "adapter", 3)
    asked = LoRARequest("sql", 1, str(adapter))
    settings = {"enable_lora": True, "num_gpu_blocks_override": 100, "max_model_len": 256, **options}
    with LLM(folders["old"], **settings) as llm:
        first = llm.generate(PROMPT, GREEDY, lora_request=asked, use_tqdm=False)
        llm.sleep(level=2)
        with pytest.raises(RequestError, match="The engine sleeps"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        llm.wake_up()
        again = llm.generate(PROMPT, GREEDY, lora_request=asked, use_tqdm=False)
        assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
        llm.update_weights(folders["new"])
        adapted = llm.generate(PROMPT, GREEDY, lora_request=asked, use_tqdm=False)
    expected = AdaptedReference(folders["new"], adapter).greedy(PROMPT, 8)
    assert adapted[0].outputs[0].token_ids == expected


def test_a_model_with_a_drafter_does_not_sleep(folders: dict[str, Path]) -> None:
    drafts = {"method": "draft_model", "model": str(folders["old"]), "num_speculative_tokens": 2}
    settings: dict[str, Any] = {"num_gpu_blocks_override": 100, "speculative_config": drafts}
    with (
        LLM(folders["old"], multiprocess=False, max_model_len=128, **settings) as llm,
        pytest.raises(RequestError, match="A model with a drafter with weights cannot sleep"),
    ):
        llm.sleep()


@pytest.mark.parametrize("family", ["qwen3-next", "granite4", "nemotron-h", "lfm2-moe"])
def test_states_are_those_of_the_loaded_weights(family: str, tmp_path: Path) -> None:
    """After a sleep, and after other weights, answers are transformers' own, also those that continue a kept
    prefix."""
    variant = {**VARIANTS[family], "max_position_embeddings": 512}
    old, new = (make_model_folder(tmp_path / str(seed), seed=seed, **variant) for seed in range(2))
    prompts = [PROMPT * 5, [*PROMPT * 5, 7, 8, 9]]
    with LLM(old, multiprocess=False, num_gpu_blocks_override=100, max_model_len=256) as llm:

        def check(folder: Path) -> None:
            reference = Reference(folder)
            for prompt in prompts:
                (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
                assert output.outputs[0].token_ids == reference.greedy(prompt, 8)

        check(old)
        states: torch.Tensor = llm.engine._client.core._executor._backend._states.memory  # type: ignore[attr-defined]
        held = states.count_nonzero()
        for level in (1, 2):
            llm.sleep(level=level)
            assert states.count_nonzero() < held / 2, "all but the pages that they share is released"
            llm.wake_up()
            check(old)
        llm.update_weights(str(new))
        check(new)
