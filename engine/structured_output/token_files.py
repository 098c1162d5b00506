"""Reads what grammars need of a tokenizer from its files, without loading it: in an engine core, which has no
tokenizer otherwise, that takes a tenth of the time and of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.config.engine_config import ModelConfig
from engine.structured_output.backend import TokenTable

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NONE = msgspec.Raw(b"null")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _TokenizerFile(msgspec.Struct):
    """The fields of a tokenizer.json that are read here."""

    model: _Model
    added_tokens: list[_AddedToken]


def table_of_files(config: ModelConfig, vocab_size: int) -> TokenTable | None:
    """What ``TokenTable.of`` gives for the loaded tokenizer; None if it must be loaded, as its files leave
    something open."""
    folder = Path(config.tokenizer or config.model)
    try:
        raw = (folder / "tokenizer.json").read_bytes()
        settings = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
        file = msgspec.json.decode(raw, type=_TokenizerFile)
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    added = {token.content: token.id for token in file.added_tokens}
    if "auto_map" in settings or not added.keys() >= _named_tokens(settings):
        return None  # loading runs other code, or adds tokens
    eos = _text_of(settings.get("eos_token"))
    others = [token for token in file.added_tokens if token.content not in file.model.vocab]
    size = len(file.model.vocab) + (len(others) if isinstance(file.model.vocab, dict) else 0)
    text = msgspec.json.encode(fields | {"padding": _NONE, "truncation": _NONE}).decode()
    num_tokens = max(vocab_size, max(added.values(), default=-1) + 1, size)
    return TokenTable(text, vocab_size, num_tokens, None if eos is None else added[eos], added)


def _named_tokens(settings: dict[str, Any]) -> set[str]:
    """The texts of the tokens that loading adds unless they are there."""
    named = [settings.get(name) for name in _SPECIAL]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name) or ()
        named += more.values() if isinstance(more, dict) else more
    named += (settings.get("added_tokens_decoder") or {}).values()
    return {text for text in map(_text_of, named) if text is not None}


def _text_of(token: Any) -> str | None:
    """The text of a token in a tokenizer_config.json."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
