"""Makes the tokenizer of a folder whose vocabulary is in tiktoken's format, without its remote code.

Such a file has a line for each token: its bytes in base64, and its rank, which is its id. It does not state
how texts are split or which tokens follow the last one: the folder's code defines both, and this module by
model type. It does not know requests or the files of the weights.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as BackendTokenizer
    from transformers import PreTrainedTokenizerFast

VOCABULARY_FILE = "tiktoken.model"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        _BEFORE + _UPPER + "*" + _LOWER + "+" + _CONTRACTED,
        _BEFORE + _UPPER + "+" + _LOWER + "*" + _CONTRACTED,
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
_PATTERNS = {"kimi_k2": _KIMI}
"""How texts are split before tokens are merged, by model type: ``pat_str`` in the folder's code."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_known_tiktoken_folder(folder: Path, trust_remote_code: bool) -> bool:
    """Whether ``load_tiktoken_folder`` must load the folder. ModelLoadError if only untrusted code can read
    the vocabulary."""
    if not (folder / VOCABULARY_FILE).is_file() or (folder / "tokenizer.json").is_file():
        return False
    config = folder / "config.json"
    if trust_remote_code and not config.is_file():
        return False
    model_type = _read_json(config).get("model_type")
    if model_type in _PATTERNS:
        return True
    if trust_remote_code:
        return False
    raise ModelLoadError(
        f"{folder / VOCABULARY_FILE} does not say how texts are split; this is known only for model type "
        f"{', '.join(_PATTERNS)}, not for {model_type!r}: add a tokenizer.json, or trust remote code."
    )


def load_tiktoken_folder(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a known folder. ModelLoadError, with the file's name, if a file is invalid."""
    from transformers import PreTrainedTokenizerFast

    config = _read_json(folder / "config.json")
    fields = _read_json(folder / "tokenizer_config.json")
    backend = _backend(_read_ranks(folder / VOCABULARY_FILE), _PATTERNS[config["model_type"]])
    _add_tokens(backend, fields.get("added_tokens_decoder"), config.get("vocab_size"), folder)
    arguments: dict[str, Any] = {name: _content(fields[name]) for name in _NAMED if fields.get(name)}
    for name, token in arguments.items():
        if backend.token_to_id(token) is None:
            _refuse(folder / "tokenizer_config.json", f"{name} is {token!r}, which is no token")
    if isinstance(fields.get("model_max_length"), int | float):
        arguments["model_max_length"] = fields["model_max_length"]
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        chat_template=_chat_template(folder, fields),
        clean_up_tokenization_spaces=False,
        **arguments,
    )
    assert isinstance(fast, PreTrainedTokenizerFast)
    return fast


def with_sorted_keys(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Returns the tools with the keys of all their objects sorted, as Kimi's code passes them to the
    template."""
    return None if tools is None else [_sorted(tool) for tool in tools]


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _read_ranks(path: Path) -> dict[str, int]:
    """Ranks of tokens, whose bytes are written as letters. The ranks must count from 0 without a gap, and
    every byte must be a token."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()  # type: ignore[no-untyped-call]
    ranks: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            name = base64.b64decode(token, validate=True).decode("latin-1").translate(letters)
            ranks[name] = int(rank)
        except ValueError:
            _refuse(path, f"line {number} is not a token in base64 and its rank")
    if set(ranks.values()) != set(range(len(ranks))):
        _refuse(path, "its ranks do not count up from 0")
    if not all(letter in ranks for letter in letters.values()):
        _refuse(path, "not every byte is a token")
    return ranks


def _backend(ranks: dict[str, int], pattern: str) -> BackendTokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    # A piece that is a token is that token, whether or not merges lead to it.
    backend = Tokenizer(models.BPE(ranks, _merges(ranks), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens to merge, in order. tiktoken merges any two that form a token, lowest rank first: so
    each token has all pairs that form it."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        places = range(1, len(token))
        pairs = [(token[:at], token[at:]) for at in places if token[:at] in ranks and token[at:] in ranks]
        merges += sorted(pairs, key=lambda pair: ranks[pair[0]])
    return merges


def _add_tokens(backend: BackendTokenizer, added: Any, vocab_size: Any, folder: Path) -> None:
    """Adds the tokens after the ranks up to ``vocab_size``: those of ``added``, the added_tokens_decoder, and
    reserved ones between them, with the names in Kimi's code. That code finds reserved tokens in texts, too,
    but does not omit them when decoding."""
    first = backend.get_vocab_size()
    path = folder / "tokenizer_config.json"
    if not isinstance(vocab_size, int) or vocab_size < first:
        _refuse(folder / "config.json", f"vocab_size is less than the {first} tokens of {VOCABULARY_FILE}")
    if not isinstance(added, dict) or not all(_is_added(*item) for item in added.items()):
        _refuse(path, "added_tokens_decoder is not an object of tokens by their ids")
    named = {int(token_id): token for token_id, token in added.items()}
    if not all(first <= token_id < vocab_size for token_id in named):
        _refuse(path, f"added_tokens_decoder has ids that are not from {first} to {vocab_size - 1}")
    reserved = ({"content": f"<|reserved_token_{token_id}|>"} for token_id in range(first, vocab_size))
    tokens = dict(enumerate(reserved, first)) | named
    backend.add_tokens([_added_token(tokens[token_id]) for token_id in range(first, vocab_size)])
    if backend.get_vocab_size() != vocab_size:
        _refuse(path, "added_tokens_decoder has a token twice, or one of the vocabulary")


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    from tokenizers import AddedToken

    flags = {flag: bool(token.get(flag)) for flag in ("lstrip", "rstrip", "single_word", "special")}
    return AddedToken(token["content"], normalized=False, **flags)


def _is_added(token_id: str, token: Any) -> bool:
    content = token.get("content") if isinstance(token, dict) else None
    return token_id.isdecimal() and isinstance(content, str) and content != ""


def _content(token: Any) -> str:
    """The text of a token, which is written as text or as an object with all its flags."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _chat_template(folder: Path, fields: Mapping[str, Any]) -> Any:
    """The template in the file, else in the config; None if there is none."""
    path = folder / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else fields.get("chat_template")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{VOCABULARY_FILE} needs the file {path}, which does not exist.") from None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        _refuse(path, "it is not a JSON object")
    return fields


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ModelLoadError(f"Cannot load the tokenizer: in {path}, {reason}.")
