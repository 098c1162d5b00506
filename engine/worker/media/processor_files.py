"""Reads the fields of a folder's processors of pictures and audio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

_FILES = ("preprocessor_config.json", "processor_config.json")
_MOST = 2**31


def processor_fields(folder: Path, name: str, needed: str) -> dict[str, Any] | None:
    """The fields of the folder's processor of this name, which is alone in a file or one of several; None if
    no file has its field ``needed``. Raises ModelLoadError."""
    for file in _FILES:
        path = folder / file
        if not path.is_file():
            continue
        try:
            fields: Any = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
        if isinstance(fields, dict) and isinstance(fields.get(name), dict):
            fields = fields[name]
        if isinstance(fields, dict) and needed in fields:
            return fields
    return None


def whole_number(fields: Mapping[str, Any], name: str, default: int, folder: Path) -> int:
    """A field that must be a positive integer. Raises ModelLoadError."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MOST:
        raise ModelLoadError(f"{name} in the configs of {folder} must be an integer from 1, got {value!r}.")
    return value
