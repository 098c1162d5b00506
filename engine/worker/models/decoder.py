"""One decoder for all native families, built of parts: ``DecoderShape`` describes their differences.

Tokens of all sequences are flattened into one axis; only the attention backend knows which token belongs to
which sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.worker.attention.backend import AttentionBackend
from engine.worker.cpu.onednn_linear import OneDNNEmbedding
from engine.worker.cpu.packed_weights import PackedEmbedding
from engine.worker.cpu.quantized_linear import Int8Embedding
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.dense_and_sparse import DenseAndSparse
from engine.worker.models.families.table import decoder_shape
from engine.worker.models.layer import DecoderLayer, prefixed
from engine.worker.models.layer_inputs import LayerInputs, ScaledLayer
from engine.worker.models.linears import Embedding, replace_modules
from engine.worker.models.mixers.kv_sharing_attention import KvSharingAttention
from engine.worker.models.mixers.latent_attention import LatentAttention
from engine.worker.models.mixers.mixed_rope_attention import QueryFactors
from engine.worker.models.mixers.state_layers import StateLayer
from engine.worker.models.moe import Experts, MixtureOfExperts
from engine.worker.models.norms import normed
from engine.worker.models.placed_media import PlacedMedia
from engine.worker.models.replacements import choose_replacements
from engine.worker.models.rotary import RotaryEmbedding
from engine.worker.models.shape import NO_ROPE
from engine.worker.models.step_values import StepValues
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.parallel.linears import ParallelLMHead, VocabParallelEmbedding
from engine.worker.states.state_pool import StatePool, StateSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FUSED_EXPERTS = (".experts.gate_up_proj", ".block_sparse_moe.input_linear.weight", ".experts.up_proj")
_CONSTANTS = ("rotary_emb.inv_freq", "act_fn.beta", "act_fn.eps")
_PREDICTORS = ("mtp.", "model.mtp.", "model.mtp_")
"""Layers for multi-token prediction, where they have names of their own."""
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Decoder(nn.Module):
    """A CausalModel, or a rank's part of one. Built on the meta device; ``materialize`` allocates its
    parameters, uninitialized."""

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        group: TensorParallelGroup = ALONE,
        *,
        experts_by_rank: bool = False,
    ) -> None:
        """``experts_by_rank``: a rank has whole experts instead of a part of each. Raises ConfigError if the
        model cannot be split among the group's ranks."""
        super().__init__()
        self.config = config
        self._group = group
        self._stage = group.stage
        whole = decoder_shape(config).of_rank(
            group.size, experts_by_rank=experts_by_rank, num_cores=group.peers.num_cores
        )
        self.num_all_layers = whole.num_layers
        self.all_windows = whole.windows
        self.all_chunks = whole.layer_chunks
        self.all_heads = whole.cached_heads
        """Number and size of the heads of all layers with keys and values of their own; empty: they are the
        same in all layers."""
        self.layer_numbers = self._stage.layers(whole.num_layers)
        """The numbers of these layers in the whole model."""
        self.shape = shape = whole if self.is_whole else whole.of_layers(self.layer_numbers)
        build = Builder(dtype, group)
        self.num_layers = shape.num_layers
        self.num_kv_heads, self.head_dim = shape.smallest_heads
        self.num_kv_vectors = 2 if shape.latent is None else 1
        self.windows = shape.windows
        self.chunks = shape.layer_chunks
        is_head = shape.tied and self._stage.is_last
        self.embedding = self._make_embedding(build) if self._stage.is_first or is_head else None
        self.values = StepValues()
        kind = ScaledLayer if shape.layer_scalars else DecoderLayer
        layers = (kind(shape, index, build, self.values) for index in range(shape.num_layers))
        self.layers = nn.ModuleList(layers)
        inputs = shape.layer_inputs
        self.layer_inputs = None if inputs is None else LayerInputs(shape, inputs, build)
        self.final_norm = build.parameter(shape.hidden_size)
        self.lm_head = None if shape.tied or not self._stage.is_last else self._make_head(build)
        self.rope_kinds = shape.rope_kinds or ("",) * shape.num_layers
        self.ropes: dict[str, RotaryEmbedding | QueryFactors] = {}
        """Rotary embeddings by their names in the config, or the QueryFactors of layers without rope."""
        self.has_fused_experts = False
        """Whether the checkpoint has the experts of a layer in one tensor."""
        self.is_headless = False
        """Whether it returns the inputs of its head instead of logits."""
        self.media: PlacedMedia | None = None
        """The next step's embeddings for tokens of pictures and clips."""

    @property
    def is_whole(self) -> bool:
        """Whether it has all layers of the model; otherwise it is a stage of a pipeline."""
        return self._stage.size == 1

    @property
    def is_last(self) -> bool:
        """Whether it computes logits."""
        return self._stage.is_last

    def _make_embedding(
        self, build: Builder
    ) -> Embedding | OneDNNEmbedding | Int8Embedding | PackedEmbedding | VocabParallelEmbedding:
        num_vectors = self.shape.vocab_size // self._group.size
        table = Embedding(build.parameter(num_vectors, self.shape.hidden_size))
        return table if self._group.size == 1 else VocabParallelEmbedding(table, self._group)

    def _make_head(self, build: Builder) -> nn.Linear | ParallelLMHead:
        linear = build.linear(self.shape.hidden_size, self.shape.vocab_size // self._group.size, bias=False)
        return linear if self._group.size == 1 else ParallelLMHead(linear, self._group)

    def materialize(self, device: torch.device) -> None:
        # Not ``to_empty``: for meta tensors it imports sympy.
        self._apply(  # type: ignore[no-untyped-call]
            lambda parameter: torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        )
        self.requires_grad_(False)
        sizes = {kind: self._rotary_size(layer) for layer, kind in enumerate(self.rope_kinds)}
        mixed = self.shape.mixed_rope
        self.ropes = {
            kind: QueryFactors(mixed.growth)
            if mixed is not None and kind == NO_ROPE
            else RotaryEmbedding(self.config, size, device, kind, self.shape.query_growth)
            for kind, size in sizes.items()
        }

    def _rotary_size(self, layer: int) -> int:
        """The numbers of each head that a layer rotates."""
        return self.shape.rotary_dim or self.shape.of_layer(layer).head_dim

    @property
    def rotary(self) -> RotaryEmbedding:
        """The rope of a model with one rope."""
        assert self.ropes, "materialize() comes first"
        rope = self.ropes[""]
        assert isinstance(rope, RotaryEmbedding)
        return rope

    def load(
        self,
        fill: Callable[[dict[str, TensorPart]], None],
        quantization: str | None = None,
        *,
        may_compile: bool = True,
    ) -> None:
        """Load the model section by section, and pack or quantize each before the next, so that at most one
        section is in memory twice. ``checkpoint_parts`` is not available afterwards."""
        replacements = choose_replacements(self, self.head_dim, self.final_norm, quantization, may_compile)
        fill(self._parts_of_ends())
        if self.lm_head is None:  # otherwise the embedding is only looked up
            replace_modules(self, Embedding, replacements.table)
        for prefix, layer in self._named_layers():
            fill(prefixed(prefix, layer.checkpoint_parts(fused=self.has_fused_experts)))
            if isinstance(layer.attention, LatentAttention):
                layer.attention.split_maps()
            replace_modules(layer, nn.Linear, replacements.linear)
            replace_modules(layer, Experts, replacements.experts)
        if self.lm_head is not None:
            fill(self._parts_of_head(self.lm_head))
            replace_modules(self, nn.Linear, replacements.head)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See CausalModel.forward."""
        x = self.stage_input(input_ids)
        media = self.media
        angles = self.angles_of(positions, x.dtype)
        for index, (layer, kind) in enumerate(zip(self.layers, self.rope_kinds, strict=True)):
            x = layer(x, *angles[kind], attention)
            if media is not None:
                x = media.add_to(x, index)
        return self.logits_of(x[sample_rows]) if self._stage.is_last else self.send_to_next(x, sample_rows)

    def serve_experts(self) -> None:
        """Take part, without own tokens, in a step of other cores with which this one shares experts."""
        nothing = self.final_norm.new_empty((0, self.shape.hidden_size))
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if isinstance(layer.mlp, MixtureOfExperts | DenseAndSparse):
                layer.mlp(nothing)

    @property
    def shares_experts(self) -> bool:
        """Whether other cores hold some of the experts."""
        return self._group.peers.num_cores > 1

    def stage_input(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The input of the first layer here: [num_tokens, hidden_size]"""
        if self._stage.is_first:
            return self.embedded(input_ids)
        return self._stage.link.receive(self.final_norm.new_empty((len(input_ids), self.shape.hidden_size)))

    def send_to_next(self, x: torch.Tensor, sample_rows: torch.Tensor) -> torch.Tensor:
        """Send x [num_tokens, hidden_size] to the next stage, which computes the logits. Returns
        uninitialized logits [num_samples, vocab_size]: this stage samples no sequence, except in warm-up
        steps."""
        self._stage.link.send(x.contiguous())
        return x.new_empty((len(sample_rows), self.shape.vocab_size))

    def embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The input of the model's first layer: [num_tokens, hidden_size], with the step's pictures and
        clips. Inputs that layers have of their own are kept for them."""
        assert self.embedding is not None, "only the first stage embeds"
        x: torch.Tensor = self.embedding(input_ids)
        scale = self.shape.embedding_scale
        if scale != 1.0:
            x = x * torch.tensor(scale, dtype=x.dtype).item()
        media = self.media
        if media is not None:
            x = media.put_into(x)
        if self.layer_inputs is not None and self.shape.layer_inputs is not None:
            media_id = self.shape.layer_inputs.media_id
            ids = input_ids if media is None else media.replaced(input_ids, media_id)
            self.values.layer_inputs = self.layer_inputs(ids, x)
        return x

    def angles_of(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The inputs of layers for each rope, by its name; see ``RotaryEmbedding.angles``."""
        if self.shape.mixed_rope is not None or self.shape.wide_rope:
            dtype = torch.float32
        return {kind: rope.angles(positions, dtype) for kind, rope in self.ropes.items()}

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_samples, hidden_size], after the last layer -> [num_samples, vocab_size], or [num_samples,
        0] on ranks other than the first"""
        x = normed(x, self.final_norm, self.shape)
        return x if self.is_headless else self.logits_of_normed(x)

    def logits_of_normed(self, x: torch.Tensor) -> torch.Tensor:
        """Like ``logits_of``, for x after the final norm."""
        logits = self.head(x)
        cap = self.shape.logit_cap
        if self.shape.logit_divisor != 1.0:
            logits = logits / self.shape.logit_divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """The linear that follows the final norm."""
        if self.lm_head is None:
            assert self.embedding is not None, "only the last stage makes logits"
            return self.embedding.logits(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits

    def note_layout(self, names: Collection[str]) -> None:
        """Record from a checkpoint's tensor names whether it has the experts of a layer in one tensor."""
        self.has_fused_experts = any(name.endswith(_FUSED_EXPERTS) for name in names)

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although this rank does not use it."""
        # Tied models may contain a copy of the embedding, old checkpoints their rope frequencies.
        # Layers for multi-token prediction may have separate names.
        # Checkpoints hold the constants of activations.
        if name == "lm_head.weight" or name.endswith(_CONSTANTS) or name.startswith(_PREDICTORS):
            return True
        if not self.is_whole and name == "model.embed_tokens.weight":
            return True
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None:
            return False
        index = int(in_layer[1])
        if index not in self.layer_numbers:
            return index < self.num_all_layers + self.shape.num_unused_layers
        layer = self.layers[index - self.layer_numbers.start]
        assert isinstance(layer, DecoderLayer)
        mlp = layer.mlp
        attention = layer.attention
        if isinstance(attention, KvSharingAttention) and in_layer[2].startswith("self_attn."):
            return attention.is_unused(in_layer[2].removeprefix("self_attn."))
        return isinstance(mlp, MixtureOfExperts) and mlp.is_of_other_rank(in_layer[2])

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """Every tensor that the checkpoint must hold, with its part and the parameter that it fills."""
        parts = self._parts_of_ends()
        for prefix, layer in self._named_layers():
            parts |= prefixed(prefix, layer.checkpoint_parts(fused=self.has_fused_experts))
        return parts if self.lm_head is None else parts | self._parts_of_head(self.lm_head)

    @property
    def state_spec(self) -> StateSpec:
        """The shape of the states that layers with a state keep per sequence."""
        dtype = self.final_norm.dtype
        states = (state for state in self.shape.states if state is not None)
        return StateSpec(tuple(state.state_parts(dtype) for state in states))

    def use_states(self, pool: StatePool) -> None:
        """Keep the states of sequences in this pool from now on."""
        with_state = (each for each in self.modules() if isinstance(each, StateLayer))
        for layer, states in zip(with_state, pool.layers, strict=True):
            layer.use_states(states)

    def _parts_of_ends(self) -> dict[str, TensorPart]:
        parts = {"model.norm.weight": TensorPart(self.final_norm)}
        if self.embedding is not None:
            assert isinstance(self.embedding, Embedding | VocabParallelEmbedding), "no parts after load()"
            rank = self._group.rank
            size = self._group.size
            parts["model.embed_tokens.weight"] = TensorPart(self.embedding.weight, 0, rank, size)
        return parts if self.layer_inputs is None else parts | self.layer_inputs.checkpoint_parts()

    def _parts_of_head(self, head: nn.Linear | ParallelLMHead) -> dict[str, TensorPart]:
        return {"lm_head.weight": TensorPart(head.weight, 0, self._group.rank, self._group.size)}

    def _named_layers(self) -> Iterator[tuple[str, DecoderLayer]]:
        """Each layer with the prefix of its tensors' names."""
        for index, layer in zip(self.layer_numbers, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            yield f"model.layers.{index}.", layer
