"""Reads a checkpoint's ``quantization_config``, and finds which tensors of the model its tensors store.

It is an allow-list: an unknown method, field or value is refused by name, before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelLoadError
from engine.worker.loading.formats.mxfp4 import Mxfp4Experts
from engine.worker.loading.formats.packed_ints import AwqWeight, GptqWeight, PackQuantizedWeight
from engine.worker.loading.formats.scaled import ScaledWeight
from engine.worker.loading.formats.stored_tensor import PlainTensor, StoredTensor, TensorEntry, need_dtype

Stored = dict[str, StoredTensor]
_Entries = dict[str, TensorEntry]

FORMAT_FIELDS = ("quantization_config", "compression_config")
"""The fields of a config.json that describe how weights are stored; the second is compressed-tensors' older
name."""
_OF_ACTIVATIONS = (
    *(".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale"),
    *(".input_zero_point", ".weight_shape"),
)
"""Endings of names of tensors that no weight needs: scales of activations and of a KV cache, neither of which
is quantized here, and a shape that other tensors already give."""
_F8 = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to store weights."""

    title: str
    """The name of the format in logs."""
    weights: Callable[[_Entries], Stored]
    """Returns the model's tensors that the entries store in this format. Raises ModelLoadError."""

    def tensors(self, entries: _Entries) -> Stored:
        """All tensors of the model, by their names in a plain checkpoint. Raises ModelLoadError."""
        found = self.weights(entries)
        used = {entry for tensor in found.values() for entry in tensor.entries}
        plain = {
            name: PlainTensor(entry)
            for name, entry in entries.items()
            if entry not in used and not name.endswith(_OF_ACTIVATIONS)
        }
        return plain | found


def read_weight_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a config.json names; None if its weights are plain. ModelLoadError, with a one-sentence
    message, if the format is not supported."""
    given = next((config[name] for name in FORMAT_FIELDS if config.get(name) is not None), None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ModelLoadError("quantization_config in config.json is not an object.")
    fields = _Fields(given)
    method = fields.one_of("quant_method", _METHODS)
    return _METHODS[method](fields)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a quantization_config, or of an object in it."""

    values: Mapping[str, Any]
    where: str = ""
    """The name of the object, followed by a dot."""
    asked: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def one_of(self, name: str, supported: Iterable[Any], default: Any = None) -> Any:
        """The value, which must be among the supported ones, ignoring case."""
        value = self.get(name, default)
        value = value.lower() if isinstance(value, str) else value
        supported = tuple(supported)
        if not any(value == known and type(value) is type(known) for known in supported):
            raise self.unsupported(name, supported)
        return value

    def nothing(self, *names: str) -> None:
        """Require that these fields are absent, null or empty."""
        for name in names:
            if self.get(name):
                raise self.unsupported(name, ("null",))

    def bearing_nothing(self, *names: str) -> None:
        """Accept any values of these fields."""
        self.asked.update(names)

    def no_others(self) -> None:
        """Refuse the fields that no call has read."""
        for name in sorted(self.values.keys() - self.asked):
            raise ModelLoadError(
                f"quantization_config.{self.where}{name} is not a known field; supported here: "
                f"{', '.join(sorted(self.asked))}."
            )

    def inner(self, name: str, value: Any) -> _Fields:
        """An object in this one. Raises ModelLoadError if the value is not an object."""
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"quantization_config.{self.where}{name} is not an object.")
        return _Fields(value, f"{self.where}{name}.")

    def unsupported(self, name: str, supported: Iterable[Any]) -> ModelLoadError:
        known = ", ".join(str(value) for value in supported)
        return ModelLoadError(
            f"quantization_config.{self.where}{name} is {self.values.get(name)!r}, which is not supported: "
            f"choose from {known}."
        )


def _fp8(fields: _Fields) -> WeightFormat:
    """DeepSeek's and Qwen's FP8, which transformers writes, too."""
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
    fields.one_of("expert_dtype", ("fp8",), "fp8")
    fields.bearing_nothing("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")
    block = _block_of(fields, "weight_block_size")
    fields.no_others()
    return WeightFormat("FP8", lambda entries: _scaled(entries, _F8, ("_scale_inv", "_scale"), block))


def _awq(fields: _Fields) -> WeightFormat:
    fields.one_of("bits", (4,), fields.get("w_bit"))
    fields.one_of("zero_point", (True,), True)
    for name in ("version", "format", "checkpoint_format"):
        fields.one_of(name, ("gemm",), "gemm")
    fields.one_of("pack_dtype", ("int32",), "int32")
    _need_only_skips(fields)
    group_size = _group_size(fields, fields.get("q_group_size", 128))
    fields.bearing_nothing("modules_to_not_convert", *_GPTQ_WITHOUT_BEARING)
    fields.no_others()

    def weights(entries: _Entries) -> Stored:
        prefixes = _prefixes(entries, "qweight")
        return {f"{prefix}weight": AwqWeight.of(entries, prefix, group_size) for prefix in prefixes}

    return WeightFormat("AWQ int4", weights)


_GPTQ_WITHOUT_BEARING = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "meta", "lm_head"),
    *("model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size", "pad_token_id"),
    *("use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
    *("max_input_length", "cache_block_outputs", "modules_in_block_to_quantize", "backend", "do_fuse"),
    *("use_exllama", "disable_exllama", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
    *("modules_to_not_convert", "desc_act", "sym", "act_group_aware", "offload_to_disk", "hyb_act"),
    *("act_order", "pack_impl", "gptaq", "beta", "tau"),
)
"""Fields that describe how the weights were made, or what other engines do with them. They include
``desc_act`` and ``sym``, because each tensor's ``g_idx`` and ``qzeros`` already give both."""


def _gptq(fields: _Fields) -> WeightFormat:
    bits = fields.one_of("bits", (4, 8))
    layout = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), fields.get("format", "gptq"))
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.one_of("is_marlin_format", (False,), False)
    fields.nothing("adapter", "rotation")
    _need_only_skips(fields)
    group_size = _group_size(fields, 128)
    fields.bearing_nothing("format", *_GPTQ_WITHOUT_BEARING)
    fields.no_others()
    zero_less = 1 if layout == "gptq" else 0

    def weights(entries: _Entries) -> Stored:
        return {
            f"{prefix}weight": GptqWeight.of(entries, prefix, group_size, bits, zero_less)
            for prefix in _prefixes(entries, "qweight")
        }

    return WeightFormat(f"GPTQ int{bits}", weights)


def _need_only_skips(fields: _Fields) -> None:
    """Require that rules for single modules only skip them (``-:pattern``); such modules are stored plain."""
    rules = fields.get("dynamic", {})
    if not isinstance(rules, Mapping) or not all(rule.startswith("-:") for rule in rules):
        raise fields.unsupported("dynamic", ("rules that begin with -:",))


def _mxfp4(fields: _Fields) -> WeightFormat:
    """The format of gpt-oss."""
    fields.bearing_nothing("modules_to_not_convert", "dequantize")
    fields.no_others()

    def weights(entries: _Entries) -> Stored:
        return {name: Mxfp4Experts.of(entries, name) for name in _prefixes(entries, "_blocks")}

    return WeightFormat("MXFP4", weights)


def _compressed_tensors(fields: _Fields) -> WeightFormat:
    layout = fields.one_of("format", _COMPRESSED)
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    fields.bearing_nothing("dequantize", "run_compressed", "use_optimized_inference")
    fields.nothing("moe_sparsity_config", "transform_config")
    sparsity = fields.inner("sparsity_config", fields.get("sparsity_config", {}))
    sparsity.one_of("format", ("dense",), "dense")
    fields.bearing_nothing("ignore", "global_compression_ratio", "version", "kv_cache_scheme")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelLoadError("quantization_config.config_groups names no group of weights.")
    named = [
        _weights_of(fields.inner(f"config_groups.{name}", group), layout) for name, group in groups.items()
    ]
    fields.no_others()
    if any(other != named[0] for other in named):
        raise ModelLoadError("quantization_config.config_groups has groups that differ in their weights.")
    return _COMPRESSED[layout](named[0])


@dataclass(frozen=True, slots=True)
class _CompressedWeights:
    """How compressed-tensors quantizes a group's weights."""

    type: str
    bits: int
    symmetric: bool
    group_size: int
    """The number of inputs per scale; -1: all."""
    block: tuple[int, int] | None


def _weights_of(group: _Fields, layout: str) -> _CompressedWeights:
    group.bearing_nothing("targets", "input_activations", "output_activations")
    group.one_of("format", (layout,), layout)
    weights = group.inner("weights", group.get("weights"))
    group.no_others()
    kinds = ("float",) if layout == "float-quantized" else ("int", "float")
    kind = weights.one_of("type", kinds if layout in _EITHER else ("int",))
    bits = weights.one_of("num_bits", (4, 8) if layout == "pack-quantized" else (8,))
    symmetric = weights.one_of("symmetric", (True, False), True)
    weights.one_of("strategy", ("tensor", "channel", "group", "block"), "tensor")
    weights.one_of("dynamic", (False,), False)
    group_size = _group_size(weights, -1)
    weights.bearing_nothing("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    block = _block_of(weights, "block_structure")
    weights.no_others()
    return _CompressedWeights(kind, bits, symmetric, group_size, block)


_EITHER = ("float-quantized", "naive-quantized")


def _compressed_scaled(weights: _CompressedWeights) -> WeightFormat:
    dtype, title = (_F8, "fp8") if weights.type == "float" else ("I8", "int8")
    return WeightFormat(
        f"compressed-tensors {title}",
        lambda entries: _scaled(entries, dtype, ("_scale",), weights.block, zeros=not weights.symmetric),
    )


def _compressed_packed(weights: _CompressedWeights) -> WeightFormat:
    def found(entries: _Entries) -> Stored:
        return {
            f"{prefix}weight": PackQuantizedWeight.of(
                entries, prefix, weights.bits, weights.group_size, weights.symmetric
            )
            for prefix in _prefixes(entries, "weight_packed")
        }

    return WeightFormat(f"compressed-tensors int{weights.bits}", found)


_COMPRESSED: Mapping[str, Callable[[_CompressedWeights], WeightFormat]] = {
    "pack-quantized": _compressed_packed,
    "int-quantized": _compressed_scaled,
    "float-quantized": _compressed_scaled,
    "naive-quantized": _compressed_scaled,
}
_METHODS: Mapping[str, Callable[[_Fields], WeightFormat]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _scaled(
    entries: _Entries,
    dtype: str,
    endings: tuple[str, ...],
    block: tuple[int, int] | None,
    *,
    zeros: bool = False,
) -> Stored:
    """The weights with a scale, which has the weight's name with one of the endings."""
    found: Stored = {}
    for name, entry in entries.items():
        scale = next((entries[name + ending] for ending in endings if name + ending in entries), None)
        if scale is None:
            continue
        need_dtype(entry, dtype)
        zero_point = entries.get(f"{name}_zero_point") if zeros else None
        found[name] = ScaledWeight.of(entry, scale, zero_point, block)
    return found


def _prefixes(entries: _Entries, ending: str) -> list[str]:
    """The part before the ending of each name that has it."""
    return [name.removesuffix(ending) for name in entries if name.endswith(ending)]


def _block_of(fields: _Fields, name: str) -> tuple[int, int] | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):  # compressed-tensors' older notation
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise fields.unsupported(name, ("two sizes", "null"))
    return value[0], value[1]


def _group_size(fields: _Fields, default: int) -> int:
    value = fields.get("group_size", default)
    if type(value) is not int or (value != -1 and (value <= 0 or value % 8)):
        raise fields.unsupported("group_size", ("-1", "a multiple of 8"))
    return value
