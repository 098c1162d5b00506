"""Settings that every test needs before anything heavy is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Tiny models gain nothing from threads, and tests share the machine; sub-processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test must not reach the hub: it fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton's kernels run in its interpreter where there is no GPU. Triton reads this once, when transformers
# imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from engine.config.engine_config import ModelConfig
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.tiny_models import make_model_folder

# Wall time proves nothing about a property on a shared machine.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


# A script's background job ignores SIGINT, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Restores SIGINT after each test, so that a change reaches no other test and no process that it starts:
    an ignored signal is inherited."""
    before, mask = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    if before is not None and signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, made once because it takes seconds."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(ModelConfig(model=str(model_folder)))
