"""Writes folders in Kimi-K2's published form: a vocabulary in tiktoken's format, and no tokenizer.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
"""The pattern of Kimi's tokenization_kimi.py."""
TEMPLATE = (
    "{% if tools %}<|im_system|>tools<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_FIRST = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
_PLAIN = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
"""Added tokens that are not special: a parser of tool calls reads them in decoded text."""


def train_ranks(texts: list[str], size: int) -> dict[bytes, int]:
    """A vocabulary of at most ``size`` tokens, trained on texts split as Kimi splits them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    in_bytes = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    vocabulary = tokenizer.get_vocab().items()
    return {bytes(in_bytes[letter] for letter in token): rank for token, rank in vocabulary}


def added_tokens(first: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    """An added_tokens_decoder with gaps, like Kimi's, after ``first`` tokens."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    ids = {text: first + at for at, text in enumerate((*_FIRST, *_PLAIN))}
    ids |= {"[UNK]": vocab_size - 2, "[PAD]": vocab_size - 1}
    return {
        str(token_id): {"content": text, "special": text not in _PLAIN, **flags}
        for text, token_id in ids.items()
    }


def write_tokenizer(folder: Path, ranks: dict[bytes, int], vocab_size: int) -> None:
    """Writes the tokenizer's files, with a config.json that has ``vocab_size``."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    fields = {
        "added_tokens_decoder": added_tokens(len(ranks), vocab_size),
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]", "lstrip": False, "rstrip": False},
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def as_kimi(folder: Path, ranks: dict[bytes, int]) -> Path:
    """Turns a model folder into one of Kimi's type, with a new tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    first = len(ranks)
    config |= {"model_type": "kimi_k2", "bos_token_id": first, "eos_token_id": first + 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, ranks, config["vocab_size"])
    return folder
