"""Reads from a model folder how it pools: from sentence-transformers' files, otherwise from the architecture.

Reads no weights. An embedding equals that of sentence-transformers 6 for the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.hf_overrides import ClassTokens
from engine.config.pooling import POOLING_TYPES, PoolingConfig
from engine.errors import ModelLoadError
from engine.worker.loading.model_folder import raw_config, resolve_folder

_LEGACY_TYPES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Fields of older folders, in the order in which their vectors are joined."""
ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "Softmax")
"""Classes of ``torch.nn`` that folders may name."""
_OWN_FILE = "config_sentence_transformers.json"
_MODULE_ORDER = {"Transformer": 1, "Pooling": 2, "LogitScore": 2, "Dense": 3, "Normalize": 4}
"""The required order of modules: in another order they compute another embedding."""
_ONCE = ("Transformer", "Pooling", "LogitScore")
_CLASSIFIER = "ForSequenceClassification"
_GENERATING = "LMHeadModel"


@dataclass(frozen=True, slots=True)
class DenseFolder:
    """A linear map after the pooling."""

    path: Path
    activation: str
    has_bias: bool


Token = int | str
"""A token's id or its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFolder:
    """How a folder's model pools."""

    folder: Path
    classifies: bool = False
    """Whether it has a linear map to classes."""
    types: tuple[str, ...] | None = None
    """The kinds of vectors computed from a prompt's rows, which are joined; None: the architecture's kind."""
    dense: tuple[DenseFolder, ...] = ()
    head_rows: tuple[tuple[Token, Token | None], ...] = ()
    """Classes that are rows of the language model's head: each is a token's row, minus another's if given."""
    joins_pairs: bool = False
    """Whether two texts form one prompt, which the client has formatted."""
    activates: bool | None = None
    """Whether embeddings are normalized, or logits become probabilities; None: the architecture decides."""
    activation: str = "Identity"
    """The function that turns logits into probabilities."""
    max_tokens: int | None = None
    """The longest prompt that the folder is meant for."""
    lowercases: bool = False
    in_chat: bool = False
    """Whether texts are put into the chat template, as in sentence-transformers 6 if its files say so."""
    prompts: Mapping[str, str]
    default_prompt: str | None = None


def read_pooling_folder(model: str, wanted: PoolingConfig) -> PoolingFolder | None:
    """How the model pools; None if it generates. Raises ModelLoadError for unsupported folders."""
    if wanted.runner == "generate":
        return None
    folder = resolve_folder(model)
    raw = raw_config(folder)
    modules = _json_file(folder / "modules.json", list)
    architecture = str((raw.get("architectures") or [""])[0])
    if wanted.class_tokens is not None:
        found = _by_tokens(folder, wanted.class_tokens)
    elif architecture.endswith(_CLASSIFIER):
        found = _classifier(folder, raw)
    elif modules is not None:
        found = _of_modules(folder, modules, raw)
    elif wanted.runner == "pooling" or _is_headless(architecture):
        found = PoolingFolder(folder=folder, prompts={})
    else:
        return None
    return _overruled(found, wanted)


def _by_tokens(folder: Path, wanted: ClassTokens) -> PoolingFolder:
    """A classifier made from a model that generates, as in V1."""
    tokens = wanted.tokens
    rows = ((tokens[1], tokens[0]),) if wanted.is_two_way else tuple((token, None) for token in tokens)
    return PoolingFolder(
        folder=folder,
        classifies=True,
        head_rows=rows,
        joins_pairs=True,
        activates=True,
        activation="Sigmoid" if len(rows) == 1 else "Softmax",
        **_prompts(folder),
        **_transformer_options(folder, ""),
    )


def _overruled(found: PoolingFolder, wanted: PoolingConfig) -> PoolingFolder:
    if wanted.pooling_type is not None:
        found = replace(found, types=(wanted.pooling_type,))
    if wanted.use_activation is not None:
        found = replace(found, activates=wanted.use_activation)
    return found


def _is_headless(architecture: str) -> bool:
    if architecture.endswith(_GENERATING):
        return False
    return architecture.endswith(("Model", "ForMaskedLM"))


def _classifier(folder: Path, raw: Mapping[str, Any]) -> PoolingFolder:
    """A classifier, as in V1 and transformers' pipelines: classes are exclusive unless the config says
    otherwise."""
    named = _named_activation(folder, raw)
    if named is not None:
        activation = named
    elif raw.get("problem_type") == "regression":
        activation = "Identity"
    else:
        one = _num_labels(raw) == 1 or raw.get("problem_type") == "multi_label_classification"
        activation = "Sigmoid" if one else "Softmax"
    return PoolingFolder(
        folder=folder,
        classifies=True,
        activates=True,
        activation=activation,
        **_prompts(folder),
        **_transformer_options(folder, ""),
    )


def _named_activation(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """The activation that the files of a cross-encoder name."""
    own = _json_file(folder / _OWN_FILE, dict) or {}
    of_config = (raw.get("sentence_transformers") or {}).get("activation_fn")
    for file, named in (
        (_OWN_FILE, own.get("activation_fn")),
        ("config.json", of_config or raw.get("sbert_ce_default_activation_function")),
    ):
        if named is not None:
            return _activation(str(named), folder / file)
    return None


def _prompts(folder: Path) -> dict[str, Any]:
    own = _json_file(folder / _OWN_FILE, dict) or {}
    prompts = {name: text for name, text in (own.get("prompts") or {}).items() if text}
    return {"prompts": prompts, "default_prompt": own.get("default_prompt_name")}


def _num_labels(raw: Mapping[str, Any]) -> int:
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(raw.get("num_labels", 2))


def _of_modules(folder: Path, modules: list[Any], raw: Mapping[str, Any]) -> PoolingFolder:
    """Read a folder of sentence-transformers, module by module."""
    found = PoolingFolder(folder=folder, activates=False, **_prompts(folder))
    stage = ""
    for module in modules:
        kind, path = _module(folder, module)
        if _MODULE_ORDER.get(kind, 0) < _MODULE_ORDER.get(stage, 0) or kind == stage in _ONCE:
            raise ModelLoadError(f"{folder / 'modules.json'} has {kind} after {stage}, which is not served.")
        stage = kind if kind in _MODULE_ORDER else stage
        match kind:
            case "Transformer":
                found = replace(found, **_transformer_options(folder, path))
            case "Pooling":
                found = replace(found, types=_types(_fields(folder / path / "config.json")))
            case "Dense":
                found = replace(found, dense=(*found.dense, _dense(folder / path)))
            case "LogitScore":
                rows = (_scored_tokens(folder / path / "config.json"),)
                activation = _named_activation(folder, raw) or "Sigmoid"
                found = replace(found, classifies=True, head_rows=rows, activates=True, activation=activation)
            case "Normalize":
                found = replace(found, activates=True)
            case "Dropout":
                pass
            case _:
                raise ModelLoadError(f"{folder / 'modules.json'} has a module {kind!r}, which is not served.")
    return found


def _module(folder: Path, module: Any) -> tuple[str, str]:
    """The class of a module and its folder, which must be inside the model's."""
    if not isinstance(module, dict) or not isinstance(module.get("path"), str):
        raise ModelLoadError(f"{folder / 'modules.json'} is not a list of modules with a path each.")
    path = module["path"]
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ModelLoadError(f"{folder / 'modules.json'} names {path!r}, which is not in its folder.")
    return str(module.get("type", "")).rpartition(".")[2], path


def _scored_tokens(path: Path) -> tuple[int, int | None]:
    """The token whose logit is the score, and the token whose logit is subtracted from it."""
    fields = _fields(path)
    tokens = fields.get("true_token_id"), fields.get("false_token_id")
    if fields.get("module_input_name", "causal_logits") != "causal_logits":
        raise ModelLoadError(f"{path} scores something other than the last token's logits.")
    if not isinstance(tokens[0], int) or not isinstance(tokens[1], int | None):
        raise ModelLoadError(f"{path} needs true_token_id, and false_token_id if there is one.")
    return tokens[0], tokens[1]


def _types(fields: Mapping[str, Any]) -> tuple[str, ...]:
    if fields.get("include_prompt") is False:
        raise ModelLoadError("A pooling that leaves prompts out (include_prompt) is not served.")
    mode = fields.get("pooling_mode")
    if mode is None:
        legacy = tuple(mode for name, mode in _LEGACY_TYPES.items() if fields.get(name))
        return legacy or ("mean",)
    modes = (mode,) if isinstance(mode, str) else tuple(mode)
    for each in modes:
        if each not in POOLING_TYPES:
            raise ModelLoadError(f"Pooling {each!r} is not known; choose from {', '.join(POOLING_TYPES)}.")
    return modes


def _dense(path: Path) -> DenseFolder:
    fields = _fields(path / "config.json")
    others = fields.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    if others or fields.get("module_output_name") not in (None, "sentence_embedding"):
        raise ModelLoadError(f"{path / 'config.json'} maps something other than the embedding.")
    if fields.get("use_residual"):
        raise ModelLoadError(f"{path / 'config.json'} has use_residual, which is not served.")
    activation = _activation(str(fields.get("activation_function", "torch.nn.Tanh")), path / "config.json")
    return DenseFolder(path, activation, bool(fields.get("bias", True)))


def _activation(named: str, named_by: Path) -> str:
    name = named.rpartition(".")[2]
    if name not in ACTIVATIONS or not named.startswith("torch."):
        raise ModelLoadError(
            f"{named_by} names activation {named!r}; served are those of torch.nn: {', '.join(ACTIVATIONS)}."
        )
    return name


def _transformer_options(folder: Path, path: str) -> dict[str, Any]:
    fields = _json_file(folder / path / "sentence_bert_config.json", dict) or {}
    longest = fields.get("max_seq_length")
    return {
        "max_tokens": longest if isinstance(longest, int) else None,
        "lowercases": bool(fields.get("do_lower_case", False)),
        "in_chat": "message" in (fields.get("modality_config") or {}),
    }


def _fields(path: Path) -> dict[str, Any]:
    found = _json_file(path, dict)
    if found is None:
        raise ModelLoadError(f"{path} is missing.")
    assert isinstance(found, dict)
    return found


def _json_file(path: Path, kind: type) -> Any:
    """The content of a JSON file of this kind; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, kind):
        raise ModelLoadError(f"{path} is not a JSON {'list' if kind is list else 'object'}.")
    return content
