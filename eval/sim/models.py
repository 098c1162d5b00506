"""Sizes of the simulator's model presets, and the resulting parameters and bytes. Knows no hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.records.kv_cache_groups import KVCacheGroup, groups_of, num_slots

_STATE_VALUE_BYTES = 4
"""Recurrent states are in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta net, which keeps a state of fixed size instead of KV; fields as in config.json, without
    ``linear_``."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def _conv_channels(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self._value_width

    @property
    def _value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim

    def params(self, hidden_size: int) -> int:
        """Parameters of one layer, including the norms around it and its output norm; per head a decay, its
        bias, and the projections to alpha and beta."""
        projections = self._conv_channels + 2 * self._value_width + 2 * self.num_value_heads
        small = self._conv_channels * self.conv_kernel_dim + 2 * self.num_value_heads + self.value_head_dim
        return hidden_size * projections + small + 2 * hidden_size

    def state_bytes(self, bytes_per_value: int) -> int:
        """Bytes of one sequence's state in a layer: the convolution's last inputs and the recurrent state."""
        recurrent = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return self._conv_channels * (self.conv_kernel_dim - 1) * bytes_per_value + (
            recurrent * _STATE_VALUE_BYTES
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """Multi-head latent attention, which caches one latent per token instead of keys and values; fields as in
    config.json."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def size(self) -> int:
        """Values per token in a layer's KV cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def params(self, hidden_size: int, num_heads: int) -> int:
        """Parameters of one layer, including the norms around it and those of the latents."""
        query_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        down = hidden_size * (self.q_lora_rank + self.size)
        of_head = self.q_lora_rank * query_dim + self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        norms = 2 * hidden_size + self.q_lora_rank + self.kv_lora_rank
        return down + num_heads * (of_head + self.v_head_dim * hidden_size) + norms

    @property
    def flop_per_pair(self) -> int:
        """A multiplication and an addition for each number of a latent, in one head's scores and values."""
        return 2 * (self.size + self.kv_lora_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a gated MLP; fields as in config.json."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    """Size of the dense MLP; unused where every layer has experts."""
    vocab_size: int
    head_dim: int = 128
    num_dense_layers: int | None = None
    """Number of first layers whose MLP is dense; None: all."""
    num_experts: int = 0
    """Routed experts per layer."""
    experts_per_token: int = 0
    num_shared_experts: int = 0
    """Experts of the same size that every token passes."""
    gated_shared_experts: bool = False
    """Whether their output is multiplied by a gate computed from the token."""
    moe_intermediate_size: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    """Whether the output head is the embedding."""
    gated_attention: bool = False
    """Whether each head's output is multiplied by a gate of the same size."""
    windows: tuple[int | None, ...] = (None,)
    """Sliding window of each attention layer in tokens, None for full attention; repeated over the layers."""
    chunks: tuple[int | None, ...] = (None,)
    """Chunk of each attention layer that is local to chunks, in tokens, None for others; repeated over the
    layers."""
    delta_net: DeltaNet | None = None
    attention_interval: int = 1
    """Every n-th layer has attention; all others have a delta net."""
    latents: Latents | None = None
    """Cached by attention instead of keys and values; its ``num_kv_heads`` is 1."""
    left_out: str = ""
    """Parts of the checkpoint that serving does not use, for the report."""

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers // self.attention_interval

    @property
    def num_state_layers(self) -> int:
        """Layers that have a delta net."""
        return self.num_layers - self.num_attention_layers

    @property
    def num_moe_layers(self) -> int:
        return 0 if self.num_dense_layers is None else self.num_layers - self.num_dense_layers

    @property
    def head_params(self) -> int:
        """Parameters of the output head; a step reads only a few rows of the equally large embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert in one layer."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def shared_params(self) -> int:
        """Parameters of the layers that every token passes: all but routed experts, embedding and head."""
        dense = self.num_layers - self.num_moe_layers
        num_gates = self.num_experts + self.gated_shared_experts
        moe = num_gates * self.hidden_size + self.num_shared_experts * self.expert_params
        delta_net = 0 if self.delta_net is None else self.delta_net.params(self.hidden_size)
        return (
            self.num_attention_layers * self._attention_params
            + self.num_state_layers * delta_net
            + dense * 3 * self.hidden_size * self.intermediate_size
            + self.num_moe_layers * moe
            + self.hidden_size
        )

    @property
    def _attention_params(self) -> int:
        """Attention parameters of one layer, including its two norms."""
        if self.latents is not None:
            return self.latents.params(self.hidden_size, self.num_heads)
        query_width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        num_wide = 2 + self.gated_attention
        params = self.hidden_size * (num_wide * query_width + 2 * kv_width + 2)
        params += (query_width + 2 * kv_width) * self.qkv_bias
        return params + 2 * self.head_dim * self.qk_norm

    @property
    def total_params(self) -> int:
        routed = self.num_moe_layers * self.num_experts * self.expert_params
        return self.shared_params + routed + (1 if self.tied_embeddings else 2) * self.head_params

    def kv_cache_groups(self, block_size: int, bytes_per_value: int) -> tuple[KVCacheGroup, ...]:
        """Layers grouped by the KV blocks they need; those with a state are the last group."""
        groups = groups_of(self.layer_windows, self.layer_chunks)
        state_bytes = self.state_bytes(bytes_per_value)
        if not state_bytes:
            return groups
        layer_bytes = self.kv_bytes_per_token(bytes_per_value) // self.num_attention_layers
        block_bytes = num_slots(groups) * layer_bytes * block_size
        layers = tuple(range(self.num_state_layers))
        return (*groups, KVCacheGroup(layers, state_blocks=-(-state_bytes // block_bytes)))

    @property
    def layer_windows(self) -> list[int | None]:
        """The window of each attention layer; None without one."""
        return [self.windows[layer % len(self.windows)] for layer in range(self.num_attention_layers)]

    def state_bytes(self, bytes_per_value: int) -> int:
        """Bytes of one sequence's state in all layers with a delta net; 0 without any."""
        return (
            0
            if self.delta_net is None
            else self.num_state_layers * self.delta_net.state_bytes(bytes_per_value)
        )

    @property
    def layer_chunks(self) -> list[int | None]:
        """The chunk of each attention layer; None without one."""
        return [self.chunks[layer % len(self.chunks)] for layer in range(self.num_attention_layers)]

    @property
    def body_params_per_token(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return self.shared_params + self.num_moe_layers * self.experts_per_token * self.expert_params

    def params_read(self, num_tokens: int) -> float:
        """Parameters that a step of ``num_tokens`` tokens reads at least once, including the output head.

        Of E experts, of which each token takes k, a step touches E·(1 - (1 - k/E)^tokens) on average: each is
        missed by one token with probability 1 - k/E, and tokens are taken to choose alike and independently.
        """
        if not self.num_experts:
            return self.shared_params + self.head_params
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        touched = self.num_experts * (1 - missed)
        return self.shared_params + self.head_params + self.num_moe_layers * touched * self.expert_params

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values, or latents, of all attention layers."""
        if self.latents is not None:
            return self.num_attention_layers * self.latents.size * bytes_per_value
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @property
    def attention_flop_per_pair(self) -> int:
        """FLOP per query and key token: a multiplication and an addition, for scores and for values."""
        if self.latents is not None:
            return self.num_attention_layers * self.num_heads * self.latents.flop_per_pair
        return 4 * self.num_attention_layers * self.num_heads * self.head_dim


_DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=1,
    intermediate_size=18432,
    vocab_size=129280,
    num_dense_layers=3,
    num_experts=256,
    experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=2048,
    latents=Latents(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    left_out="its layer for multi-token prediction",
)
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama-3.1-8b",
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
        ),
        ModelShape(
            name="llama-3.1-70b",
            hidden_size=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            intermediate_size=28672,
            vocab_size=128256,
        ),
        ModelShape(
            name="qwen3-30b-a3b",
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            intermediate_size=6144,
            vocab_size=151936,
            num_dense_layers=0,
            num_experts=128,
            experts_per_token=8,
            moe_intermediate_size=768,
            qk_norm=True,
        ),
        ModelShape(
            name="glm-4.5",
            hidden_size=5120,
            num_layers=92,
            num_heads=96,
            num_kv_heads=8,
            intermediate_size=12288,
            vocab_size=151552,
            num_dense_layers=3,
            num_experts=160,
            experts_per_token=8,
            num_shared_experts=1,
            moe_intermediate_size=1536,
            qkv_bias=True,
            qk_norm=True,
            left_out="its layer for multi-token prediction",
        ),
        ModelShape(
            name="gpt-oss-20b",
            hidden_size=2880,
            num_layers=24,
            num_heads=64,
            num_kv_heads=8,
            intermediate_size=2880,
            vocab_size=201088,
            head_dim=64,
            num_dense_layers=0,
            num_experts=32,
            experts_per_token=4,
            moe_intermediate_size=2880,
            qkv_bias=True,
            windows=(128, None),
        ),
        ModelShape(
            name="llama-4-scout",
            hidden_size=5120,
            num_layers=48,
            num_heads=40,
            num_kv_heads=8,
            intermediate_size=16384,
            vocab_size=202048,
            num_dense_layers=0,
            num_experts=16,
            experts_per_token=1,
            num_shared_experts=1,
            moe_intermediate_size=8192,
            chunks=(8192, 8192, 8192, None),
            left_out="its vision tower",
        ),
        ModelShape(
            name="gemma-3-27b",
            hidden_size=5376,
            num_layers=62,
            num_heads=32,
            num_kv_heads=16,
            intermediate_size=21504,
            vocab_size=262208,
            qk_norm=True,
            tied_embeddings=True,
            windows=(1024, 1024, 1024, 1024, 1024, None),
            left_out="its vision tower",
        ),
        _DEEPSEEK_V3,
        replace(
            _DEEPSEEK_V3,
            name="kimi-k2",
            num_heads=64,
            vocab_size=163840,
            num_dense_layers=1,
            num_experts=384,
            left_out="",
        ),
        ModelShape(
            name="qwen3-next-80b-a3b",
            hidden_size=2048,
            num_layers=48,
            num_heads=16,
            num_kv_heads=2,
            intermediate_size=5120,
            vocab_size=151936,
            head_dim=256,
            num_dense_layers=0,
            num_experts=512,
            experts_per_token=10,
            num_shared_experts=1,
            gated_shared_experts=True,
            moe_intermediate_size=512,
            qk_norm=True,
            gated_attention=True,
            delta_net=DeltaNet(
                num_key_heads=16,
                num_value_heads=32,
                key_head_dim=128,
                value_head_dim=128,
                conv_kernel_dim=4,
            ),
            attention_interval=4,
            left_out="its layer for multi-token prediction",
        ),
    )
}
