"""Keeps torch, which only the engine core needs, out of an API server process."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any


def load_tokenizers() -> None:
    """Imports transformers as if torch were not installed, since its tokenizers do not need it. The process
    starts sooner and takes less memory. Other code that imports torch, such as a custom tokenizer, finds it
    afterwards."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise installing torch
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # marks a module as missing; transformers checks only once
    try:
        import_module("transformers").AutoTokenizer  # noqa: B018 - loaded at its first access
    finally:
        del modules["torch"]
