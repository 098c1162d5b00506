"""For every family, one engine computes a prompt, the other fetches its KV and gives the same tokens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tests.worker.conftest import MODEL_NAMES, WITH_STATES, ModelFolders
from tests.worker.generation import Reference, random_tokens
from tests.worker.kv_transfer import NEEDS_NIXL

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LENGTHS = (100, 112, 145)
"""The second prompt ends with a full block, whose last token the other engine computes."""
OF_EACH_KIND = ("llama", "gpt-oss", "deepseek-v3", "granite4")
"""Plain, with windows, with latents, with states."""
ONLY_WINDOWS = ("mistral-window", "mixtral-window")
"""Models that at the end of a full block have freed the KV that a shorter prefix would need."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def engine(
    folder: Path, role: str, port: int, connector: str = "TCPConnector", **options: Any
) -> Iterator[LLM]:
    states: dict[str, Any] = {"num_state_slots": 24} if folder.name in WITH_STATES else {}
    llm = LLM(
        str(folder),
        multiprocess=False,
        device="cpu",
        max_model_len=256,
        num_gpu_blocks_override=160,
        max_num_batched_tokens=64,
        kv_transfer_config={
            "kv_connector": connector,
            "kv_role": role,
            "kv_port": port,
            "kv_connector_extra_config": {"allowed_ports": ["1024-65535"]},
        },
        **states,
        **options,
    )
    try:
        yield llm
    finally:
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "connector"),
    [
        *((name, "TCPConnector") for name in MODEL_NAMES),
        *(pytest.param(name, "NixlConnector", marks=NEEDS_NIXL) for name in OF_EACH_KIND),
    ],
)
def test_the_other_engine_goes_on(name: str, connector: str, model_folders: ModelFolders) -> None:
    folder = model_folders(name)
    reference = Reference(folder)
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    answer = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with (
        engine(folder, "kv_producer", free_port(), connector) as first,
        engine(folder, "kv_consumer", free_port(), connector) as second,
    ):
        computed = first.generate(
            prompts, ONE_TOKEN, use_tqdm=False, kv_transfer_params={"do_remote_decode": True}
        )
        params = [output.kv_transfer_params for output in computed]
        outputs = second.generate(prompts, answer, use_tqdm=False, kv_transfer_params=params)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == reference.greedy(prompt, 20)
            is_lost = name in ONLY_WINDOWS and len(prompt) % 16 == 0
            assert output.num_cached_tokens == (0 if is_lost else (len(prompt) - 1) // 16 * 16)
