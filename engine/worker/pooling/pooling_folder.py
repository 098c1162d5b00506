"""What a model folder says of pooling: sentence-transformers' files, else the architecture.

Reads no weights. An embedding is that of sentence-transformers 6 for the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError
from engine.pooling.config import POOLING_TYPES, PoolingConfig
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
_CLASSIFIER = "ForSequenceClassification"
_GENERATING = "LMHeadModel"


@dataclass(frozen=True, slots=True)
class DenseFolder:
    """A linear map behind the pooling."""

    path: Path
    activation: str
    has_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFolder:
    """How a folder's model pools."""

    folder: Path
    classifies: bool = False
    """Whether it has a linear map to classes."""
    types: tuple[str, ...] | None = None
    """How vectors are made of a prompt's rows, which are joined; None: the architecture's way."""
    dense: tuple[DenseFolder, ...] = ()
    activates: bool = False
    """Whether embeddings are normalized, or logits made probabilities."""
    activation: str = "Identity"
    """What makes probabilities of logits."""
    max_tokens: int | None = None
    """Longest prompt that the folder is meant for."""
    lowercases: bool = False
    in_chat: bool = False
    """Whether texts are put into the chat template, as sentence-transformers 6 does if its files say so."""
    prompts: Mapping[str, str]
    default_prompt: str | None = None


def read_pooling_folder(model: str, wanted: PoolingConfig) -> PoolingFolder | None:
    """How the model pools; None if it generates. Raises ModelLoadError for what is not known."""
    if wanted.runner == "generate":
        return None
    folder = resolve_folder(model)
    raw = raw_config(folder)
    modules = _json_file(folder / "modules.json", list)
    architecture = str((raw.get("architectures") or [""])[0])
    if architecture.endswith(_CLASSIFIER):
        found = _classifier(folder, raw)
    elif modules is not None:
        found = _of_modules(folder, modules)
    elif wanted.runner == "pooling" or _is_headless(architecture):
        found = PoolingFolder(folder=folder, activates=architecture.endswith("ForCausalLM"), prompts={})
    else:
        return None
    return _overruled(found, wanted)


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
    """As V1 and transformers' pipelines: classes are exclusive unless the config says otherwise."""
    own = raw.get("sentence_transformers") or {}
    named = own.get("activation_fn") or raw.get("sbert_ce_default_activation_function")
    if named is not None:
        activation = _activation(str(named), folder / "config.json")
    elif raw.get("problem_type") == "regression":
        activation = "Identity"
    else:
        one = _num_labels(raw) == 1 or raw.get("problem_type") == "multi_label_classification"
        activation = "Sigmoid" if one else "Softmax"
    options = _transformer_options(folder, "")
    if options["in_chat"]:
        raise ModelLoadError(
            f"{folder} puts pairs of texts into its chat template by roles, which is not served."
        )
    return PoolingFolder(
        folder=folder,
        classifies=True,
        activates=True,
        activation=activation,
        prompts={},
        **options,
    )


def _num_labels(raw: Mapping[str, Any]) -> int:
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(raw.get("num_labels", 2))


def _of_modules(folder: Path, modules: list[Any]) -> PoolingFolder:
    """What a folder of sentence-transformers says, module by module."""
    own = _json_file(folder / "config_sentence_transformers.json", dict) or {}
    found = PoolingFolder(
        folder=folder,
        prompts={name: text for name, text in (own.get("prompts") or {}).items() if text},
        default_prompt=own.get("default_prompt_name"),
    )
    for module in modules:
        kind, path = _module(folder, module)
        match kind:
            case "Transformer":
                found = replace(found, **_transformer_options(folder, path))
            case "Pooling":
                found = replace(found, types=_types(_fields(folder / path / "config.json")))
            case "Dense":
                found = replace(found, dense=(*found.dense, _dense(folder / path)))
            case "Normalize":
                found = replace(found, activates=True)
            case "Dropout":
                pass
            case _:
                raise ModelLoadError(f"{folder / 'modules.json'} has a module {kind!r}, which is not served.")
    return found


def _module(folder: Path, module: Any) -> tuple[str, str]:
    """The class of a module and its folder, which must lie in the model's."""
    if not isinstance(module, dict) or not isinstance(module.get("path"), str):
        raise ModelLoadError(f"{folder / 'modules.json'} is not a list of modules with a path each.")
    path = module["path"]
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ModelLoadError(f"{folder / 'modules.json'} names {path!r}, which is not in its folder.")
    return str(module.get("type", "")).rpartition(".")[2], path


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
        raise ModelLoadError(f"{path / 'config.json'} maps something else than the embedding.")
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
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, kind):
        raise ModelLoadError(f"{path} is not a JSON {'list' if kind is list else 'object'}.")
    return content
