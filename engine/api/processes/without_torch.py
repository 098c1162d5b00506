"""Keeps torch, which only the engine core computes with, out of a front end's process."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any


def load_tokenizers() -> None:
    """Import transformers as if torch were not installed: its tokenizers do not need it.

    A front end starts sooner so, and takes less memory. Code of others that imports torch itself, such as a
    tokenizer's own, finds it afterwards.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # how Python is told of a module that is not there; transformers asks but once
    try:
        import_module("transformers").AutoTokenizer  # noqa: B018 - loaded when it is first asked for
    finally:
        del modules["torch"]
