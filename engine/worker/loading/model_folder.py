"""Finds the model folder and reads the facts that the engine needs from its config. Loads no weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError, ModelLoadError
from engine.process.hub import hub_answers
from engine.worker.loading.formats.weight_format import FORMAT_FIELDS, WeightFormat, read_weight_format
from engine.worker.loading.native_config import native_config
from engine.worker.loading.text_decoder import decoder_config, is_multimodal, thinker_of
from engine.worker.models.rotary import STATIC_ROPE_TYPES, all_ropes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
_READ_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not know, with a model type that has the same architecture."""
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**16,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**40,
}
"""Upper limits for sizes in a config, far above those of any model."""
_STRETCHING_ROPE_TYPES = ("linear", "dynamic", "yarn")


def resolve_folder(model: str) -> Path:
    """Return the folder of a model given by path or by hub name."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelLoadError(f"{model} is a file, not a model folder.")
    if folder.is_absolute() or not _HUB_NAME.fullmatch(model) or model.startswith("."):
        raise ModelLoadError(f"The model folder {model} does not exist.")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # needed only for a hub name

    try:
        offline = not hub_answers(model)
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES), local_files_only=offline))
    except Exception as error:  # the hub client's own errors, the HTTP library's and the system's
        raise ModelLoadError(
            f"No model folder {model}, and it could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}). Give a folder, or a model that was downloaded before."
        ) from error


def read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the folder's config, without transformers if possible. The result does not contain how weights are
    stored: see ``read_format``."""
    native = native_config(_without_format(raw_config(folder)))
    if native is not None:
        return cast("PreTrainedConfig", native)
    config = read_by_transformers(folder, trust_remote_code)
    return decoder_config(config) if is_multimodal_folder(folder) else config


def is_multimodal_folder(folder: Path) -> bool:
    """Whether the folder holds a decoder with other parts that are left out."""
    return is_multimodal(raw_config(folder))


def read_format(folder: Path) -> WeightFormat | None:
    """The format of the folder's weights, or of its decoder's; None if plain. Raises ModelLoadError."""
    raw = raw_config(folder)
    own = read_weight_format(raw)
    if own is None and is_multimodal(raw):
        return read_weight_format(thinker_of(raw).get("text_config") or {})
    return own


def _without_format(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in FORMAT_FIELDS}


def raw_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json.")
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} is not a JSON object.")
    _check_sizes(path, raw)
    return raw


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    """Check sizes before memory is allocated by them. Raises ModelLoadError for a size that no model has."""
    for name, most in _MOST.items():
        value = raw.get(name)
        if isinstance(value, int) and not 0 <= value <= most:
            raise ModelLoadError(f"{path}: {name} must be from 0 to {most}, got {str(value)[:40]}.")
    for part in ("text_config", "thinker_config"):
        if isinstance(raw.get(part), dict):
            _check_sizes(path, raw[part])


def read_by_transformers(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the folder's config as a transformers object, from which its models are built, as if the weights
    were plain."""
    import transformers  # takes seconds and 150 MB

    path = folder / "config.json"
    fields = raw_config(folder)
    read_as = _READ_AS.get(str(fields.pop("model_type", None)))
    try:
        if read_as is None:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        else:
            fields.pop("auto_map", None)
            config = transformers.AutoConfig.for_model(read_as, **fields)
    except Exception as error:  # anything from KeyError to its own validation errors
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"Architecture {_named_in(path)!r} in {path} is not known to transformers "
            f"{transformers.__version__}, or its config is invalid ({first_line})."
        ) from error
    assert isinstance(config, transformers.PreTrainedConfig)
    for name in FORMAT_FIELDS:
        if hasattr(config, name):
            delattr(config, name)
    return config


def _named_in(path: Path) -> Any:
    """The architecture that a config.json names, or else its model type."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return (raw.get("architectures") or [raw.get("model_type")])[0]


def choose_dtype(requested: str, config: PreTrainedConfig) -> torch.dtype:
    """The type of weights and KV: the requested one, or else the checkpoint's."""
    if requested != "auto":
        dtype = getattr(torch, requested)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own: torch.dtype | str | None = config.dtype
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."))
    if own in (torch.float32, torch.bfloat16, torch.float16):
        assert isinstance(own, torch.dtype)
        return own
    return torch.float32


def dtype_of_dequantized(own: torch.dtype, device: torch.device) -> torch.dtype:
    """The type for a quantized checkpoint if none was requested. On CPUs, bfloat16 replaces float16, which
    such checkpoints name for GPU kernels and for which there are no kernels here."""
    return torch.bfloat16 if device.type == "cpu" and own == torch.float16 else own


def choose_device(requested: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The device of a rank: the requested one, or else cuda if available."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device.")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested != "cuda":
        return torch.device(requested)
    num_devices = torch.cuda.device_count()
    if num_devices < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks on a machine need as many CUDA devices, but there are {num_devices}."
        )
    return torch.device(requested, rank)


def choose_max_model_len(model: ModelConfig, config: PreTrainedConfig) -> int:
    """The requested length if the model supports it, or else the model's own limit."""
    limit = _own_max_model_len(config)
    if model.max_model_len is None:
        if limit is None:
            raise ConfigError("The model's config names no maximum length; set max_model_len.")
        return limit
    if limit is not None and model.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {model.max_model_len}, but the model's maximum context length is {limit}."
        )
    return model.max_model_len


def _own_max_model_len(config: PreTrainedConfig) -> int | None:
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    # Layers with a window need no more than its length, whatever their rope.
    reaches = [
        _stretched(limit, rope) for kind, rope in all_ropes(text).items() if kind != "sliding_attention"
    ]
    return min(reaches, default=limit)


def _stretched(limit: int, rope: dict[str, Any]) -> int:
    if rope.get("rope_type") not in _STRETCHING_ROPE_TYPES:
        return limit
    original: int = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * rope.get("factor", 1.0)))


def check_rope(config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse frequencies that depend on a sequence's length, as one batch holds sequences of many lengths."""
    text = config.get_text_config(decoder=True)
    for kind, rope in all_ropes(text).items():
        rope_type = rope.get("rope_type") or "default"
        if rope_type in STATIC_ROPE_TYPES | {"proportional"}:
            continue
        original: int = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if max_model_len > original:
            whose = f" of its {kind} layers" if kind else ""
            raise ModelLoadError(
                f"Rope type {rope_type!r}{whose} is served only up to its original length; "
                f"set max_model_len to at most {original}."
            )
