"""The sizes of a model folder whose family runs in our own decoder, from the shape of which that is built.

Imports torch and transformers; ``model_folder`` reads the commonest families without them.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelLoadError
from engine.worker.loading.model_folder import read_config
from engine.worker.loading.text_decoder import decoder_config, is_multimodal
from engine.worker.models.families.table import NATIVE_MODEL_TYPES, decoder_shape, is_native
from engine.worker.models.mixers.state_shapes import DeltaNetShape
from engine.worker.models.shape import DecoderShape, DenseShape, SparseShape
from eval.errors import HardwareError
from eval.sim.models import DeltaNet, Latents, ModelShape


def shape_of_native(folder: Path, kind: object) -> ModelShape:
    """The shape of a folder of this ``model_type``. HardwareError for types, layers and sizes that have no
    place in it."""
    if kind not in NATIVE_MODEL_TYPES and not is_multimodal({"model_type": kind}):
        known = ", ".join(NATIVE_MODEL_TYPES)
        raise HardwareError(f"{folder}: model_type must be one of {known} to read sizes, got {kind!r}.")
    try:
        config = read_config(folder, trust_remote_code=False)
    except ModelLoadError as error:
        raise HardwareError(f"{folder}: {error}") from error
    if is_multimodal({"model_type": config.model_type}):
        config = decoder_config(config)
    if not is_native(config):
        raise HardwareError(f"{folder}: its config asks for what the native decoder does not compute.")
    return _model_shape(folder, decoder_shape(config))


def _model_shape(folder: Path, shape: DecoderShape) -> ModelShape:
    dense = [mlp for mlp in shape.mlps if isinstance(mlp, DenseShape)]
    sparse = [mlp for mlp in shape.mlps if isinstance(mlp, SparseShape)]
    experts = sparse[0] if sparse else None
    has_square = any(mlp.squared or mlp.by_xielu for mlp in dense) or any(mlp.squared for mlp in sparse)
    is_odd = bool(shape.layer_heads or shape.layer_inputs or has_square)
    is_partial = len(dense) + len(sparse) < shape.num_layers
    if is_odd or is_partial or (experts and experts.shared_size % experts.expert_size):
        raise HardwareError(f"{folder}: the simulator does not know layers such as it has.")
    return ModelShape(
        name=str(folder),
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        intermediate_size=dense[0].intermediate_size if dense else 0,
        vocab_size=shape.vocab_size,
        head_dim=shape.head_dim,
        num_dense_layers=len(dense) if sparse else None,
        num_experts=experts.routing.num_experts if experts else 0,
        experts_per_token=experts.routing.experts_per_token if experts else 0,
        num_shared_experts=experts.shared_size // experts.expert_size if experts else 0,
        gated_shared_experts=bool(experts and experts.gated_share),
        moe_intermediate_size=experts.expert_size if experts else 0,
        qkv_bias=shape.qkv_bias,
        qk_norm=shape.qk_norm,
        tied_embeddings=shape.tied,
        gated_attention=shape.output_gate,
        windows=shape.windows,
        chunks=shape.layer_chunks,
        delta_net=_delta_net(folder, shape),
        attention_interval=shape.num_layers // len(shape.windows),
        latents=_latents(folder, shape),
    )


def _delta_net(folder: Path, shape: DecoderShape) -> DeltaNet | None:
    if not any(shape.states):
        return None
    every = shape.num_layers // len(shape.windows)
    is_regular = all((state is None) == ((i + 1) % every == 0) for i, state in enumerate(shape.states))
    net = next(state for state in shape.states if state is not None)
    if not is_regular or not isinstance(net, DeltaNetShape):
        raise HardwareError(f"{folder}: the simulator knows states of delta nets at regular distances only.")
    return DeltaNet(
        num_key_heads=net.num_k_heads,
        num_value_heads=net.num_v_heads,
        key_head_dim=net.k_size,
        value_head_dim=net.v_size,
        conv_kernel_dim=net.conv_width,
    )


def _latents(folder: Path, shape: DecoderShape) -> Latents | None:
    latent = shape.latent
    if latent is None:
        return None
    if latent.index is not None:
        raise HardwareError(f"{folder}: the simulator does not know indexers.")
    if latent.q_rank is None:
        raise HardwareError(f"{folder}: the simulator knows latents with q_lora_rank only.")
    return Latents(
        q_lora_rank=latent.q_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
    )
