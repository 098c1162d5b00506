"""The sizes and switches from which a decoder is built, and each rank's part of them. Knows no family."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.worker.models.mixers.state_shapes import StateShape


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A gated MLP: every token goes through all of it."""

    intermediate_size: int
    bias: bool = False
    by_gelu: bool = False
    """Whether the gate goes through the tanh form of GELU; otherwise through SiLU."""
    joined: bool = False
    """Whether a checkpoint has gates and ups in one tensor."""
    squared: bool = False
    """Whether it has no gate: ``down(relu(up) ** 2)``."""
    by_xielu: bool = False
    """Whether it has no gate, but xIELU, whose slopes are learned: ``down(xielu(up))``."""
    gate_scale: float = 1.0
    """A factor of gates, before SiLU; not with GELU or a square."""
    output_scale: float = 1.0
    """A factor of outputs; likewise."""

    def of_rank(self, num_ranks: int, *, experts_by_rank: bool, num_cores: int = 1) -> DenseShape:
        """The shape of each rank's part, the same in all cores. ConfigError if it cannot be split."""
        size = split("intermediate size,", self.intermediate_size, num_ranks)
        return replace(self, intermediate_size=size)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts and their weights are chosen."""

    num_experts: int
    experts_per_token: int
    normalized: bool = True
    """Whether the weights of a token's experts add up to 1."""
    by_sigmoid: bool = False
    """Whether a score is the sigmoid of a logit, in fp32, to which a correction is added for the choice;
    otherwise scores are a softmax over all experts, of logits in the model's dtype."""
    in_fp32: bool = False
    """Whether a softmax router computes its logits in fp32, too."""
    corrected: bool = False
    """Whether a softmax router adds a correction to its scores for the choice, and has its weights in
    fp32."""
    smallest_sum: float = 0.0
    """The least number by which a corrected softmax router divides its weights."""
    biased: bool = False
    """Whether a softmax router adds a bias to its logits."""
    rounded: bool = False
    """Whether weights are rounded to the model's dtype; otherwise they are fp32."""
    num_groups: int = 1
    num_top_groups: int = 1
    """The number of best groups, from whose members a token's experts are chosen."""
    scale: float = 1.0
    """A factor of all weights."""
    scales_input: bool = False
    """Whether an expert's input is multiplied by the sigmoid of its logit, instead of its output by a
    weight."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a checkpoint's tensors."""

    prefix: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_experts"
    transposed: bool = False
    """Whether the tensors that hold all experts have inputs before outputs."""
    joined_share: bool = False
    """Whether gates and ups of the shared expert are in one tensor."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Experts with biases, whose gates and ups alternate: ``(up + 1) * gate * sigmoid(alpha * gate)``."""

    alpha: float
    limit: float
    """The upper bound of gates and of the absolute value of ups."""


@dataclass(frozen=True, slots=True)
class SparseShape:
    """A mixture of experts: every token goes through a few of many gated MLPs."""

    expert_size: int
    """The intermediate size of an expert."""
    routing: Routing
    shared_size: int = 0
    """The intermediate size of the expert that all tokens go through; 0 if there is none."""
    names: ExpertNames = ExpertNames()
    clamped: ClampedGate | None = None
    """None: experts without biases, ``silu(gate) * up``, all gates before all ups."""
    squared: bool = False
    """Whether experts, and the shared one, have no gate: ``down(relu(up) ** 2)``."""
    latent_size: int = 0
    """The numbers of a token that experts read and write, between two linears; 0: its hidden state."""
    by_gelu: bool = False
    """Whether an expert's gate goes through the tanh form of GELU; otherwise through SiLU."""
    gated_share: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a number per token."""
    by_rank: bool = False
    """Whether each rank has some whole experts; otherwise it has a part of each."""
    num_ranks: int = 1
    """Ranks that have parts of the experts, in all cores that share them."""

    @property
    def num_local_experts(self) -> int:
        """The number of experts that a rank has, whole or in part."""
        return self.routing.num_experts // self.num_ranks if self.by_rank else self.routing.num_experts

    def first_expert(self, rank: int) -> int:
        """The number of the first expert that a rank has."""
        return rank * self.num_local_experts if self.by_rank else 0

    def of_rank(self, num_ranks: int, *, experts_by_rank: bool, num_cores: int = 1) -> SparseShape:
        """The shape of each rank's part; ``num_cores`` share the experts. ConfigError if it cannot be split
        that way."""
        expert_size = self.expert_size
        if experts_by_rank:
            _check_experts(self.routing.num_experts, num_ranks, num_cores)
        else:
            expert_size = split("intermediate size of experts,", expert_size, num_ranks)
        return replace(
            self,
            expert_size=expert_size,
            shared_size=split("intermediate size of shared experts,", self.shared_size, num_ranks),
            by_rank=experts_by_rank,
            num_ranks=num_ranks * num_cores,
        )


@dataclass(frozen=True, slots=True)
class PairShape:
    """A dense MLP and a mixture of experts beside it; see ``DenseAndSparse``."""

    dense: DenseShape
    sparse: SparseShape

    def of_rank(self, num_ranks: int, *, experts_by_rank: bool, num_cores: int = 1) -> PairShape:
        """The shape of each rank's part. ConfigError if it cannot be split that way."""
        dense = self.dense.of_rank(num_ranks, experts_by_rank=experts_by_rank, num_cores=num_cores)
        sparse = self.sparse.of_rank(num_ranks, experts_by_rank=experts_by_rank, num_cores=num_cores)
        return PairShape(dense, sparse)


MLPShape = DenseShape | SparseShape | PairShape
MLPs = tuple[MLPShape | None, ...]
"""The MLP of each layer, None where it has none."""
NO_ROPE = "none"
"""Replaces a rope's name in layers without rope."""


@dataclass(frozen=True, slots=True)
class IndexShape:
    """An indexer, which chooses the tokens that latent attention attends to; see ``LatentIndexer``."""

    num_heads: int
    head_dim: int
    """The size of a head's query, and of a token's key; its first ``rope_dim`` numbers are rotated."""
    top_k: int
    """The number of tokens that are chosen."""
    interleaved: bool
    """Whether the numbers of a rotated pair are neighbors."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention; see ``LatentAttention``. Sizes are counts of numbers; parts of a head have
    the names of the family's configs."""

    q_rank: int | None
    """The size of a query's latent; None if queries are computed from the layer's input."""
    kv_rank: int
    """The size of the latent from which keys and values are computed."""
    nope_dim: int
    """The part of a head's query and key that is not rotated."""
    rope_dim: int
    """The part that is rotated; that of keys is the same in all heads."""
    value_dim: int
    interleaved: bool = True
    """Whether the numbers of a rotated pair are neighbors; otherwise they are half of ``rope_dim`` apart."""
    bias: bool = False
    """Whether the first and the last linear of attention have a bias."""
    stretch: float = 1.0
    """A factor of scores."""
    index: IndexShape | None = None
    """None: attention to all tokens."""

    @property
    def own_size(self) -> int:
        """The numbers of a token's latent and of the rotated part of its keys."""
        return self.kv_rank + self.rope_dim

    @property
    def latent_size(self) -> int:
        """The numbers of a token in a layer's cache: with an indexer, its key comes last."""
        return self.own_size + (0 if self.index is None else self.index.head_dim)

    @property
    def query_dim(self) -> int:
        """The size of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """The factor of Q·K."""
        return self.stretch / math.sqrt(self.query_dim)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries that grow with their position, so that attention stays sharp over long contexts
    (``attn_temperature_tuning`` in configs): at position p they are multiplied by
    1 + growth * log(1 + floor(p / interval))."""

    growth: float
    interval: int


@dataclass(frozen=True, slots=True)
class MixedRope:
    """Rope in some layers; see ``MixedRopeAttention``."""

    unit_heads: bool
    """Whether layers that rotate queries and keys normalize them afterwards, without a weight."""
    growth: QueryGrowth
    """How queries grow in layers without rope, where positions count from 1."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The key-value heads of one layer, where layers differ."""

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    """Whether values are computed from what the keys are, without a linear of their own."""
    sinks: bool = False
    """Whether each head has a sink; see ``DecoderShape``."""
    num_kv_copies: int = 1

    def of_rank(self, num_ranks: int) -> HeadShape:
        """Each rank's heads. ConfigError if they cannot be split that way."""
        heads, copies = split_kv_heads(self.num_kv_heads, num_ranks)
        return replace(self, num_kv_heads=heads, num_kv_copies=copies)

    @property
    def sizes(self) -> tuple[int, int]:
        """Number and size of the heads."""
        return self.num_kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class BesideShape:
    """Attention and a state in one layer; see ``AttentionBesideState``. Factors of the inputs and outputs of
    both."""

    attention_input: float
    attention_output: float
    state_input: float
    state_output: float


@dataclass(frozen=True, slots=True)
class LayerInputShape:
    """Embeddings of tokens for each layer; see ``LayerInputs``."""

    vocab_size: int
    size: int
    """The numbers of a token's embedding for one layer."""
    media_id: int = 0
    """The token whose embedding the tokens of pictures and clips have here."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and switches in which decoders differ."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    windows: tuple[int | None, ...]
    """The attention window of each layer that attends, None where there is none."""
    mlps: MLPs
    mixes: tuple[bool, ...] = ()
    """Whether each layer attends or has a state; empty: all do."""
    chunks: tuple[int | None, ...] = ()
    """The attention chunk of each layer that attends, None where there is none; empty: no layer has one."""
    states: tuple[StateShape | None, ...] = ()
    """The state that each layer keeps instead of attention, None where it has none; empty: all attend."""
    beside: BesideShape | None = None
    """Layers with a state attend, too, and the outputs of both are added; None: they do not attend."""
    qkv_bias: bool = False
    joined_qkv: bool = False
    """Whether a checkpoint has the linears of queries, keys and values in one tensor."""
    output_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    """Whether ``qk_norm`` takes the queries, and the keys, of all heads as one vector; otherwise each
    head's."""
    sinks: bool = False
    """Whether each head has a sink; see ``AttentionBackend.attend``."""
    output_gate: bool = False
    """Whether each head's output is multiplied by the sigmoid of a gate, which is computed with its query."""
    head_gates: bool = False
    """Whether each head's output is multiplied by the sigmoid of a number, which a linear of its own
    computes."""
    has_rope: bool = True
    neighbor_rope: bool = False
    """Whether the numbers of a rotated pair are neighbors; otherwise they are half of the rotated part
    apart."""
    wide_rope: bool = False
    """Whether queries and keys are rotated in fp32, then rounded; otherwise in the model's dtype."""
    rotary_dim: int = 0
    """The number of first numbers of each head that are rotated; 0 means all."""
    rope_kinds: tuple[str, ...] = ()
    """The name of each layer's rope in the config, or NO_ROPE; empty if all have the same."""
    attention_scale: float | None = None
    """The factor of Q·K; None: head_dim ** -0.5."""
    attention_cap: float | None = None
    """The soft cap of attention scores; see ``AttentionBackend.attend``."""
    logit_cap: float | None = None
    """The soft cap of logits: cap * tanh(logit / cap)."""
    centered_norms: bool = False
    """Whether norms have a factor of 1 + weight; otherwise the factor is the weight."""
    query_growth: QueryGrowth | None = None
    """None: queries do not grow."""
    mixed_rope: MixedRope | None = None
    """None: all layers use rope in the same way."""
    latent: LatentShape | None = None
    """Latent attention in all layers, with the latent as the only key-value head."""
    layer_heads: tuple[HeadShape, ...] = ()
    """The key-value heads of each layer; empty: those of this shape."""
    kv_of: tuple[int, ...] = ()
    """Where some layers attend to the keys and values of others, the one that each attends to, by its number
    among those with their own; empty: each has its own."""
    value_dim: int = 0
    """The size of a head's value; 0: that of its key. In the cache, zeros follow smaller ones."""
    value_scale: float = 1.0
    """A factor of values."""
    unit_values: bool = False
    """Whether each head's value is normalized, without a weight."""
    layer_scalars: bool = False
    """Whether the output of each layer is multiplied by a number."""
    layer_inputs: LayerInputShape | None = None
    """None: layers have no embeddings of their own."""
    indexes: tuple[bool, ...] = ()
    """Whether each layer has an indexer, or attends to what the last one before it has chosen; empty: latent
    attention has none."""
    input_norms: bool = True
    """Whether the inputs of attention and MLP are normalized."""
    output_norms: bool = False
    """Whether the outputs of attention and MLP are normalized before they are added."""
    mean_norms: bool = False
    """Whether norms subtract the mean first (layer norm, without a bias)."""
    parallel_mlps: bool = False
    """Whether a layer's MLP reads the same normalized input as its attention, and both outputs are added."""
    output_normed: tuple[bool, ...] = ()
    """Whether each layer normalizes these outputs instead of the inputs; empty: all do the same, as the two
    before say."""
    embedding_scale: float = 1.0
    """A factor of embeddings, rounded to the model's dtype."""
    mlp_prefix: str = "mlp."
    """The prefix of the names of a dense MLP's tensors, within a layer."""
    residual_scale: float = 1.0
    """A factor of the outputs of attention and MLP when they are added."""
    logit_divisor: float = 1.0
    other_names: tuple[tuple[str, str], ...] = ()
    """Prefixes of the names of a layer's tensors, each with the checkpoint's prefix."""
    num_unused_layers: int = 0
    """Layers of the checkpoint after the last one, which are not computed here."""
    num_kv_copies: int = 1
    """Number of ranks with the same key-value heads, if there are fewer heads than ranks."""

    def of_rank(self, num_ranks: int, *, experts_by_rank: bool = False, num_cores: int = 1) -> DecoderShape:
        """The shape of each rank's part: some of the heads and of each MLP, and of the experts, which
        ``num_cores`` share, its core's part. ConfigError if the model cannot be split that way."""
        num_heads = split("number of heads,", self.num_heads, num_ranks)
        mlps = tuple(
            mlp and mlp.of_rank(num_ranks, experts_by_rank=experts_by_rank, num_cores=num_cores)
            for mlp in self.mlps
        )
        split("vocabulary size,", self.vocab_size, num_ranks)
        num_kv_heads, num_kv_copies = split_kv_heads(self.num_kv_heads, num_ranks)
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_kv_copies=num_kv_copies,
            layer_heads=tuple(heads.of_rank(num_ranks) for heads in self.layer_heads),
            mlps=mlps,
            states=tuple(None if state is None else state.of_rank(num_ranks) for state in self.states),
        )

    def of_layers(self, layers: range) -> DecoderShape:
        """The shape of only these layers, for a model without states. ConfigError if the first one needs a
        layer before it."""
        assert not self.states, "layers that attend are counted apart"
        part = slice(layers.start, layers.stop)
        if self.kv_of or self.layer_inputs is not None:
            raise ConfigError(
                "pipeline_parallel_size does not suit this model: its layers attend to keys and values of "
                "others, or read embeddings of their own."
            )
        if self.indexes and not self.indexes[layers.start]:
            raise ConfigError(
                f"pipeline_parallel_size does not suit this model: layer {layers.start} would begin a stage, "
                "but it attends to the tokens that a layer before it has chosen."
            )
        return replace(
            self,
            windows=self.windows[part],
            chunks=self.chunks[part],
            mlps=self.mlps[part],
            rope_kinds=self.rope_kinds[part],
            indexes=self.indexes[part],
            output_normed=self.output_normed[part],
            layer_heads=self.layer_heads[part],
        )

    def of_layer(self, layer: int) -> DecoderShape:
        """The shape with the key-value heads of one layer."""
        if not self.layer_heads:
            return self
        heads = self.layer_heads[layer]
        return replace(
            self,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            num_kv_copies=heads.num_kv_copies,
            sinks=self.sinks or heads.sinks,
        )

    def has_own_kv(self, layer: int) -> bool:
        """Whether a layer writes the keys and values that it attends to."""
        return not self.kv_of or self.kv_of[layer] not in self.kv_of[:layer]

    @property
    def cached_heads(self) -> tuple[tuple[int, int], ...]:
        """Number and size of the heads of each layer with keys and values of its own; empty if they are the
        same in all layers."""
        each = enumerate(self.layer_heads)
        cached = tuple(heads.sizes for layer, heads in each if self.has_own_kv(layer))
        return cached if len(set(cached)) > 1 else ()

    @property
    def smallest_heads(self) -> tuple[int, int]:
        """Number and size of the heads of the layers with the smallest keys and values."""
        alike = (self.num_kv_heads, self.head_dim)
        every = (heads.sizes for heads in self.layer_heads)
        return min(every, key=lambda heads: heads[0] * heads[1], default=alike)

    def mixes_in(self, layer: int) -> bool:
        """Whether a layer attends or has a state."""
        return not self.mixes or self.mixes[layer]

    def normalizes(self, layer: int) -> tuple[bool, bool]:
        """Whether a layer normalizes the inputs of attention and MLP, and whether their outputs."""
        if not self.output_normed:
            return self.input_norms, self.output_norms
        return not self.output_normed[layer], self.output_normed[layer]

    def attention_index(self, layer: int) -> int:
        """The number of a layer among those that attend, or of the one to whose keys and values it
        attends."""
        if self.kv_of:
            return self.kv_of[layer]
        if not self.states or self.beside is not None:
            return layer
        before = zip(self.states[:layer], self.mixes or (True,) * layer, strict=False)
        return sum(state is None and mixes for state, mixes in before)

    @property
    def num_layers(self) -> int:
        return len(self.mlps)

    @property
    def layer_chunks(self) -> tuple[int | None, ...]:
        """The attention chunk of each layer that attends, None where there is none."""
        return self.chunks or (None,) * len(self.windows)

    @property
    def is_sparse(self) -> bool:
        """Whether some layer has a mixture of experts."""
        return any(isinstance(mlp, SparseShape | PairShape) for mlp in self.mlps)

    @property
    def is_compiled(self) -> bool:
        """Whether compiled CPU steps support it: all but latents, heads that differ, normalized values,
        numbers and embeddings of layers, a mixed rope, growing queries, states, MLPs without gates or beside
        attention, gated shared experts, corrections of softmax routers, factors of residuals and logits,
        norms of all heads or of means, missing norms, and ropes of neighbors."""
        sparse = [mlp for mlp in self.mlps if isinstance(mlp, SparseShape)]
        has_gate = any(mlp.gated_share or mlp.routing.corrected for mlp in sparse)
        has_square = any(not isinstance(mlp, PairShape) and mlp and mlp.squared for mlp in self.mlps)
        has_xielu = any(isinstance(mlp, DenseShape) and mlp.by_xielu for mlp in self.mlps)
        is_parallel = self.mean_norms or self.parallel_mlps
        is_other = (
            self.head_gates or self.unit_values or self.layer_scalars or self.layer_inputs or self.layer_heads
        )
        is_scaled = self.residual_scale != 1.0 or self.logit_divisor != 1.0
        has_attention = self.latent is None and self.mixed_rope is None and not any(self.states)
        is_llama = self.input_norms and not self.norms_all_heads and not self.neighbor_rope
        has_known_mlps = not has_gate and not has_square and not has_xielu and not is_parallel
        is_known = has_attention and has_known_mlps and self.query_growth is None
        return is_known and is_llama and not is_scaled and not is_other and not self.wide_rope

    @property
    def is_plain(self) -> bool:
        """Whether fused GPU ops support it: layers compute the same as Llama's, except for biases, head
        norms, windows and experts."""
        gemma = self.attention_scale, self.attention_cap, self.logit_cap
        by_gelu = any(isinstance(mlp, DenseShape) and mlp.by_gelu for mlp in self.mlps)
        switches = self.rope_kinds, self.centered_norms, self.output_norms, by_gelu, self.sinks
        is_llama = self.is_compiled and not any(switches)
        return is_llama and gemma == (None,) * 3 and self.embedding_scale == 1.0

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def values_size(self) -> int:
        return self.num_kv_heads * (self.value_dim or self.head_dim)

    @property
    def attended_size(self) -> int:
        """The numbers of all heads' outputs."""
        return self.num_heads * (self.value_dim or self.head_dim)


def split_kv_heads(number: int, num_ranks: int) -> tuple[int, int]:
    """Each rank's key-value heads, and the number of ranks with the same ones. ConfigError if they cannot be
    split that way."""
    if number % num_ranks and num_ranks % number:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, which neither divides the number of the model's "
            f"key-value heads, {number}, nor is a multiple of it."
        )
    return max(1, number // num_ranks), max(1, num_ranks // number)


def _check_experts(num_experts: int, num_ranks: int, num_cores: int) -> None:
    """Raise ConfigError if ranks would have different numbers of experts."""
    if num_cores == 1:
        split("number of experts,", num_experts, num_ranks)
    elif num_experts % (num_cores * num_ranks):
        raise ConfigError(
            f"data_parallel_size is {num_cores}, with {num_ranks} ranks each, which share experts "
            f"(enable_expert_parallel): {num_cores * num_ranks} ranks do not divide the model's "
            f"{num_experts} experts."
        )


def split(name: str, number: int, num_ranks: int) -> int:
    """Each rank's share of a number. ConfigError with its ``name`` if it is not a whole number."""
    if number % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, which does not divide the model's {name} {number}."
        )
    return number // num_ranks
