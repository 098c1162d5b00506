"""Runs any decoder-only architecture of transformers on the paged KV cache, through its attention interface.

All sequences of a step are one flat row of tokens. transformers keeps no cache and makes no mask, except in a
trial run that shows which mask it would make.
"""

from __future__ import annotations

import inspect
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.worker.attention.backend import AttentionBackend
from engine.worker.models.base import cannot_be_served, layer_windows
from engine.worker.models.faster_modules import RowsLinear, replace_experts, replace_linears, replace_norms
from engine.worker.models.replacements import Replacements
from engine.worker.models.split_modules import split_modules
from engine.worker.models.trial_masks import TrialMasks
from engine.worker.parallel.group import ALONE, TensorParallelGroup

_numbers = itertools.count()
_IN_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)")
"""The path of a module of a layer that adapters may name."""
_NO_INTERFACE = "it does not use transformers' attention interface"
_WITHOUT_BEARING = frozenset(
    (
        *("dropout", "is_causal", "output_attentions", "position_ids", "cache_position", "use_cache"),
        *("sliding_window", "logits_to_keep"),
    )
)
"""Arguments of the attention interface that add nothing to the mask; dropout is for training. Any other
argument that ``TransformersModel`` does not name changes the result of attention, or may."""
_TRIAL_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NameError)
_PACKED = 0.05
_QUANTIZED = 0.5
"""The most by which replaced modules may change the logits of a trial run, as a share of their length: by
bf16 sums in another order, or by weights in 4 bits. A model that runs wrongly changes them altogether."""


@dataclass(frozen=True, slots=True)
class _LayerProbe:
    """The shapes and the window seen in one call of the attention interface."""

    layer: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    """Number of tokens that a query attends to, itself included; None: all tokens before it."""


def _attend_by(model: weakref.ref[TransformersModel]) -> Callable[..., tuple[torch.Tensor, None]]:
    """A function for transformers' table, which keeps it for good, unlike the model."""

    def attend(*arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
        own = model()
        assert own is not None, "its modules are only run by it"
        return own._attend(*arguments, **named)

    return attend


def _forget(attention_name: str) -> None:
    AttentionInterface._global_mapping.pop(attention_name, None)


class TransformersModel:
    """A CausalModel around a transformers model.

    It is built on the meta device, as a skeleton; ``attach`` adds the weights and finds the shape of the KV
    with a trial run.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
        self._config = config
        self.windows = layer_windows(config.get_text_config(decoder=True))
        """The attention window of each layer: first the config's, after the trial run the real one."""
        self.chunks: list[int | None] = [None] * len(self.windows)
        self._attention: AttentionBackend | None = None
        self._probes: list[_LayerProbe] = []
        self._model: PreTrainedModel | None = None
        self._group: TensorParallelGroup = ALONE
        self._split: dict[str, str] = {}
        """The paths of linears of which this rank has a part, each with its style."""
        # One registration per model, so that the function reaches only this model's backend.
        self.attention_name = f"paged_kv_{next(_numbers)}"
        self._masks = TrialMasks(config)
        AttentionInterface.register(self.attention_name, _attend_by(weakref.ref(self)))
        weakref.finalize(self, _forget, self.attention_name)
        self.skeleton = self._build_skeleton(dtype, trust_remote_code)
        self._takes_rows = "logits_to_keep" in inspect.signature(self.skeleton.forward).parameters
        self.num_layers = self.num_kv_heads = self.head_dim = 0
        self.num_kv_vectors = 2
        self.all_heads: tuple[tuple[int, int], ...] = ()
        """See ``Decoder.all_heads``."""

    def attach(self, model: PreTrainedModel) -> None:
        self._model = model.requires_grad_(False)
        model.train(False)
        self.num_layers, self.num_kv_heads, self.head_dim = self._probe(model)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the attached model; all ranks call it. ConfigError if the model cannot be
        split; ModelLoadError if its parts do not compute the same in a trial run."""
        assert self._model is not None, "attach() comes first"
        before = self._trial(self._model)
        self._split = split_modules(self._model, group)
        self._group = group
        try:
            after = self._trial(self._model)
        except _TRIAL_ERRORS as error:
            raise cannot_be_served(self._config, f"its parts end in {type(error).__name__}") from error
        if not (after - before).norm() <= _PACKED * before.norm():
            raise cannot_be_served(self._config, "its parts give other logits")
        self.num_layers, self.num_kv_heads, self.head_dim = self._shape_of_kv()

    def replace_modules(self, replacements: Replacements, *, quantized: bool) -> None:
        """Replace linears and norms of the attached model. Raises ModelLoadError if its code does not run
        with them, or gives other logits in a trial run; it must then be loaded again."""
        assert self._model is not None, "attach() comes first"
        before = self._trial(self._model)
        replace_norms(self._model)
        replace_experts(self._model, replacements, quantized=quantized)
        replace_linears(self._model, replacements, quantized=quantized)
        try:
            after = self._trial(self._model)
        except _TRIAL_ERRORS as error:
            raise cannot_be_served(self._config, f"replaced modules end in {type(error).__name__}") from error
        tolerance = _QUANTIZED if quantized else _PACKED
        if not (after - before).norm() <= tolerance * before.norm():
            raise cannot_be_served(self._config, "replaced modules change its logits")

    def detach(self) -> None:
        """Drop the attached model, so that its memory is free."""
        self._model = None

    def linears_of_layers(self) -> list[dict[str, RowsLinear]]:
        """The linears of each layer that all tokens go through, by their names within it, so that their
        ``rows`` can be wrapped. Experts are left out."""
        assert self._model is not None, "attach() comes first"
        found: list[dict[str, RowsLinear]] = [{} for _ in range(self.num_layers)]
        for path, module in list(self._model.named_modules()):
            in_layer = _IN_LAYER.fullmatch(path)
            if in_layer is None or "experts" in path or not isinstance(module, nn.Linear | RowsLinear):
                continue
            if isinstance(module, nn.Linear):
                module = RowsLinear(module, module.in_features, module.out_features)
                self._model.set_submodule(path, module)
            found[int(in_layer[1])][in_layer[2].removesuffix(".partial")] = module
            module.split = self._split.get(path.removesuffix(".partial"))
        return found

    @property
    def dtype(self) -> torch.dtype:
        assert self._model is not None, "attach() comes first"
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        assert self._model is not None, "attach() comes first"
        return self._model.device

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See ``CausalModel.forward``."""
        assert self._model is not None, "attach() comes first"
        self._attention = attention
        return self._logits(self._model, input_ids, positions, sample_rows)

    def _logits(
        self, model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        only_rows: dict[str, Any] = {"logits_to_keep": rows} if self._takes_rows else {}
        output = model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **only_rows)
        logits: torch.Tensor = output.logits[0]
        return logits if self._takes_rows else logits[rows]

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """The function that transformers calls: query, key, value [1, heads, tokens, dim] -> [1, tokens,
        heads, dim]"""
        layer = getattr(module, "layer_idx", None)
        assert isinstance(layer, int), "every attention interface of transformers numbers its layers"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._attention is None:
            for number in (scaling, softcap):
                if number is not None and not isinstance(number, int | float):
                    raise cannot_be_served(self._config, "its attention scale is not a single number")
            if s_aux is not None and s_aux.shape != query.shape[1:2]:
                raise cannot_be_served(self._config, "it has more than one sink per head")
            return self._record(layer, module, query, key, value, attention_mask, arguments)
        # In the cache, zeros follow values that are smaller than keys.
        value_dim = value.shape[-1]
        padded = pad(value, (0, key.shape[-1] - value_dim)) if value_dim < key.shape[-1] else value
        attended = self._attention.attend(
            layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            padded[0].transpose(0, 1),
            scale=scale,
            window=self.windows[layer],
            soft_cap=softcap,
            sinks=s_aux,
        )
        return attended[None, ..., :value_dim], None

    def _record(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        for name, given in arguments.items():
            if name not in _WITHOUT_BEARING and given is not None and given is not False:
                raise cannot_be_served(self._config, f"its attention uses {name}")
        if getattr(module, "is_causal", True) is False or arguments.get("is_causal") is False:
            raise cannot_be_served(self._config, "its attention is not causal")
        window = self._masks.window_of(attention_mask)
        self._probes.append(_LayerProbe(layer, key.shape[1], key.shape[-1], value.shape[-1], window))
        heads = query.shape[1]
        tokens = query.shape[2]
        dim = value.shape[-1]
        return query.new_zeros((1, tokens, heads, dim)), None

    def _build_skeleton(self, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        """Build the model on the meta device, after the checks that need no run."""
        if self._config.is_encoder_decoder:
            raise cannot_be_served(self._config, "it is an encoder-decoder")
        try:
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    self._config,
                    dtype=dtype,
                    attn_implementation=self.attention_name,
                    trust_remote_code=trust_remote_code,
                )
        except ValueError as error:
            raise cannot_be_served(
                self._config, "transformers has no causal language model for it"
            ) from error
        except (TypeError, AttributeError, RuntimeError) as error:
            raise cannot_be_served(
                self._config, f"transformers cannot build it: {type(error).__name__}: {error}"
            ) from error
        except KeyError as error:  # old models look up their attention class by name
            raise cannot_be_served(self._config, _NO_INTERFACE) from error
        if not model._supports_attention_backend:
            raise cannot_be_served(self._config, _NO_INTERFACE)
        return model

    def _trial(self, model: PreTrainedModel) -> torch.Tensor:
        """The logits of two tokens, with zeros for the output of attention, whose calls it records."""
        self._probes = []
        tokens = torch.arange(2, device=model.device)
        with torch.inference_mode(), self._masks.made_for(self.attention_name):
            return self._logits(model, tokens, tokens, tokens).float()

    def _probe(self, model: PreTrainedModel) -> tuple[int, int, int]:
        """Return (num_layers, num_kv_heads, head_dim), as seen by the attention in a run over two tokens."""
        try:
            self._trial(model)
        except _TRIAL_ERRORS as error:
            raise cannot_be_served(self._config, f"a trial run failed with {type(error).__name__}") from error
        return self._shape_of_kv()

    def _shape_of_kv(self) -> tuple[int, int, int]:
        """The same, as seen in the last trial run."""
        probes = self._probes
        self._probes = []
        if [probe.layer for probe in probes] != list(range(len(self.windows))):
            raise cannot_be_served(self._config, "not every layer keeps its state in attention")
        self.windows = [probe.window for probe in probes]
        if any(probe.value_dim > probe.head_dim for probe in probes):
            raise cannot_be_served(self._config, "its values are larger than its keys")
        heads = tuple((probe.num_kv_heads, probe.head_dim) for probe in probes)
        self.all_heads = heads if len(set(heads)) > 1 else ()
        num_kv_heads, head_dim = min(heads, key=lambda each: each[0] * each[1])
        return len(probes), num_kv_heads, head_dim
