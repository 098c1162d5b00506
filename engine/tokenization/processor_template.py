"""The chat template of a folder whose tokenizer has none: multimodal models were published with a template of
their processor, in a file that tokenizers do not read."""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import ModelLoadError

FILE = "chat_template.json"


def processor_template(folder_or_name: str) -> str | None:
    """Reads the template in the ``chat_template.json`` of a folder or a hub name; None without the file.
    Raises ModelLoadError if the file has no template."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(
            folder_or_name,
            FILE,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # neither a folder nor a valid hub name
        return None
    return None if path is None else _template_in(Path(path), folder_or_name)


def _template_in(path: Path, folder_or_name: str) -> str:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{FILE} of {folder_or_name!r} is not valid JSON: {error}.") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ModelLoadError(f"{FILE} of {folder_or_name!r} has no chat_template that is a text.")
    return template
