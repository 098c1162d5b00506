"""A decoder that runs a whole step in one call of compiled code.

In torch, a small step spends its time on a dozen calls per layer and on waking threads for each; a large step
spends it on elementwise ops over all rows.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.layer_places import LayerPlace
from engine.worker.cpu.attention_kernel import PoolAddress, SequenceAddresses
from engine.worker.cpu.compiled_adapters import NO_ADAPTERS, AdaptersAddress, CompiledAdapters
from engine.worker.cpu.cores import MAX_CPUS, cores_for, usable_cpus
from engine.worker.cpu.kernels.library import typed
from engine.worker.cpu.kernels.weights import CompiledGemm, ExpertsAddress, WeightAddress
from engine.worker.cpu.packed_experts import PackedExperts
from engine.worker.cpu.packed_weights import PackedEmbedding, PackedWeightLinear, Weight16
from engine.worker.cpu.paged_attention import CpuPagedAttention
from engine.worker.cpu.thread_team import ThreadTeam
from engine.worker.lora.low_rank import LowRankLinear, StepAdapters
from engine.worker.memory import empty_pages
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.layer import DecoderLayer
from engine.worker.models.linears import Embedding
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.moe import MixtureOfExperts
from engine.worker.models.rotary import RotaryEmbedding
from engine.worker.models.shape import DenseShape, SparseShape

logger = logging.getLogger(__name__)

_UNIT = 64
"""The kernels compute this many elements at a time; all sizes must be multiples of it."""
_ROTARY_UNIT = 32
MOST_KEPT = 512
"""Up to this number of rows, the memory of the logits is kept from step to step."""


class _Router(ctypes.Structure):
    """A Router."""

    _fields_ = (
        ("weight", WeightAddress),
        ("correction", ctypes.c_void_p),
        ("per_token", ctypes.c_int64),
        ("normalized", ctypes.c_int64),
        ("rounded", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_top_groups", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


class _Sparse(ctypes.Structure):
    """A MixtureOfExperts without its shared expert."""

    _fields_ = (("router", _Router), ("experts", ExpertsAddress))


class _Layer(ctypes.Structure):
    """A DecoderLayer and its LayerPlace; window and chunk 0 mean full attention, a null ``sparse`` a dense
    MLP.

    In a sparse layer ``gate_up`` and ``down`` are those of the shared expert, if there is one.
    """

    _fields_ = (
        ("qkv", WeightAddress),
        ("output", WeightAddress),
        ("gate_up", WeightAddress),
        ("down", WeightAddress),
        ("input_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("attention_output_norm", ctypes.c_void_p),
        ("mlp_output_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("rope", ctypes.c_int64),
        ("by_gelu", ctypes.c_int64),
        ("sparse", ctypes.POINTER(_Sparse)),
    )


class _Rope(ctypes.Structure):
    """A RotaryEmbedding."""

    _fields_ = (("frequencies", ctypes.c_void_p), ("scaling", ctypes.c_double))


class _Model(ctypes.Structure):
    """A Decoder; caps of 0 mean no cap."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("head", WeightAddress),
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("ropes", ctypes.POINTER(_Rope)),
        ("num_layers", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("num_ropes", ctypes.c_int64),
        ("norm_eps", ctypes.c_double),
        ("norm_center", ctypes.c_double),
        ("embedding_scale", ctypes.c_double),
        ("attention_scale", ctypes.c_double),
        ("attention_cap", ctypes.c_double),
        ("logit_cap", ctypes.c_double),
        ("is_headless", ctypes.c_int64),
    )


class _Step(ctypes.Structure):
    """The arguments of ``CausalModel.forward`` and its result."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_samples", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sample_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("adapters", AdaptersAddress),
    )


class _CpuSet(ctypes.Structure):
    """A set of CPUs in the layout of ``cpu_set_t``: CPU n is bit n."""

    _fields_ = (("bits", ctypes.c_uint64 * (MAX_CPUS // 64)),)


class _Cores(ctypes.Structure):
    """The CPUs of each thread's core; if empty, threads are not pinned."""

    _fields_ = (
        ("all", _CpuSet),
        ("each", ctypes.POINTER(_CpuSet)),
        ("num_cores", ctypes.c_int64),
    )


def with_compiled_steps(
    model: CausalModel, attention: AttentionBackend, adapters: StepAdapters | None = None
) -> CausalModel:
    """Wrap ``model`` in a CompiledDecoder if this model and this attention allow it."""
    if not isinstance(model, Decoder) or not isinstance(attention, CpuPagedAttention):
        return model
    if not hasattr(attention.library, "continuum_run_step") or not _is_known(model):
        return model
    logger.info("Using the compiled CPU backend for whole steps.")
    return CompiledDecoder(model, attention, adapters)


def _is_known(model: Decoder) -> bool:
    """Whether the kernels support everything that this decoder computes."""
    shape = model.shape
    mlps = [mlp for mlp in shape.mlps if isinstance(mlp, DenseShape | SparseShape)]
    inner = (mlp.intermediate_size if isinstance(mlp, DenseShape) else mlp.shared_size for mlp in mlps)
    sizes = (shape.hidden_size, *inner, shape.query_size, shape.kv_size)
    is_looked_up = model.lm_head is None or isinstance(model.embedding, Embedding)
    return (
        model.is_whole
        and not model.shares_experts
        and is_looked_up
        and shape.is_compiled
        and not (shape.output_norms and shape.is_sparse)
        and model.num_layers > 0
        and all(size % _UNIT == 0 for size in sizes)
        and shape.rotary_dim % _ROTARY_UNIT == 0
        and all(isinstance(sparse.experts, PackedExperts) for sparse in _sparse_mlps(model))
        and all(
            isinstance(module, PackedWeightLinear | PackedEmbedding)
            for module in (_head(model), *(linear for layer in model.layers for linear in _linears(layer)))
            if module is not None
        )
    )


def _linears(layer: nn.Module) -> tuple[nn.Module | None, ...]:
    """The linears in the order of _Layer; None in place of those of a missing shared expert."""
    assert isinstance(layer, DecoderLayer)
    assert isinstance(layer.attention, SelfAttention)
    mlp = layer.mlp.shared if isinstance(layer.mlp, MixtureOfExperts) else layer.mlp
    gated = (None, None) if mlp is None else (mlp.gate_up, mlp.down)
    linears = (layer.attention.qkv, layer.attention.output, *gated)
    return tuple(each.plain if isinstance(each, LowRankLinear) else each for each in linears)


def _sparse_mlps(model: Decoder) -> list[MixtureOfExperts]:
    return [mlp for mlp in model.modules() if isinstance(mlp, MixtureOfExperts)]


def _head(model: Decoder) -> nn.Module:
    head = model.embedding if model.lm_head is None else model.lm_head
    assert head is not None, "a whole model has one"
    return head


class CompiledDecoder:
    """A CausalModel for one attention backend, run by the compiled kernels."""

    def __init__(
        self, model: Decoder, attention: CpuPagedAttention, adapters: StepAdapters | None = None
    ) -> None:
        """``model``: one that ``with_compiled_steps`` accepts; its weights are shared, not copied."""
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.num_kv_vectors = model.num_kv_vectors
        self.windows = model.windows
        self.chunks = model.chunks
        self._plain = model
        self._attention = attention
        self._adapters = None if adapters is None else CompiledAdapters(adapters, model.num_layers)
        num_threads = torch.get_num_threads()
        self._team = ThreadTeam(num_threads)
        self._cores = _cores(cores_for(num_threads))
        self._logits = torch.empty(0)
        gemm = CompiledGemm(attention.library)
        self._routers = {mlp: _router(mlp, gemm) for mlp in _sparse_mlps(model)}
        layers = (_layer(model, index, place, self._routers) for index, place in enumerate(attention.places))
        self._model = _model(model, (_Layer * model.num_layers)(*layers))
        sequences = ctypes.POINTER(SequenceAddresses)
        self._run_step = typed(
            attention.library.continuum_run_step,
            ctypes.POINTER(_Model),
            ctypes.POINTER(PoolAddress),
            sequences,
            sequences,
            ctypes.POINTER(_Step),
            ctypes.POINTER(_Cores),
            ctypes.c_int64,
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See ``CausalModel.forward``."""
        if attention is not self._attention or self._plain.media is not None:
            return self._plain.forward(input_ids, positions, sample_rows, attention)
        num_tokens = len(input_ids)
        logits = self._logits_buffer(len(sample_rows))
        step = _Step(
            num_tokens,
            len(sample_rows),
            input_ids.data_ptr(),
            positions.data_ptr(),
            sample_rows.data_ptr(),
            logits.data_ptr(),
            NO_ADAPTERS if self._adapters is None else self._adapters.address(),
        )
        pool, decodes, prompts = self._attention.addresses
        self._team.compute(
            num_tokens,
            lambda threads: self._run_step(self._model, pool, decodes, prompts, step, self._cores, threads),
        )
        return logits

    def _logits_buffer(self, num_samples: int) -> torch.Tensor:
        """Return a buffer [num_samples, vocab_size], or headless [num_samples, hidden_size], in the same
        memory at each step: freeing it in between would let small allocations fragment it, and the next step
        would need more. Buffers of long prompts, which are rare, are not kept."""
        width = self._plain.shape.hidden_size if self._plain.is_headless else self._plain.shape.vocab_size
        if num_samples > MOST_KEPT:
            return torch.empty((num_samples, width), dtype=torch.bfloat16)
        if num_samples > len(self._logits):
            capacity = 1 << (num_samples - 1).bit_length()
            self._logits = empty_pages((capacity, width), torch.bfloat16)
        return self._logits[:num_samples]


def _model(model: Decoder, layers: ctypes.Array[_Layer]) -> _Model:
    shape = model.shape
    ropes = [_rope(rope) for rope in model.ropes.values()]
    return _Model(
        layers,
        _weight(_head(model)),
        model.embedding.weight.data_ptr() if isinstance(model.embedding, Embedding) else None,
        model.final_norm.data_ptr(),
        (_Rope * len(ropes))(*ropes),
        shape.num_layers,
        shape.hidden_size,
        shape.num_heads,
        shape.rotary_dim or shape.head_dim,
        len(ropes),
        shape.norm_eps,
        float(shape.centered_norms),
        torch.tensor(shape.embedding_scale, dtype=torch.bfloat16).item(),
        shape.attention_scale or shape.head_dim**-0.5,
        shape.attention_cap or 0.0,
        shape.logit_cap or 0.0,
        model.is_headless,
    )


def _rope(rope: object) -> _Rope:
    assert isinstance(rope, RotaryEmbedding)
    return _Rope(rope.frequencies.data_ptr(), rope.scaling)


def _layer(
    model: Decoder, index: int, place: LayerPlace, routers: Mapping[MixtureOfExperts, PackedWeightLinear]
) -> _Layer:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer)
    attention = layer.attention
    assert isinstance(attention, SelfAttention)
    mlp = model.shape.mlps[index]
    vectors = (
        layer.input_norm,
        layer.post_attention_norm,
        layer.attention_output_norm,
        layer.mlp_output_norm,
        attention.q_norm,
        attention.k_norm,
        attention.sinks,
    )
    return _Layer(
        *(_weight(linear) for linear in _linears(layer)),
        *(None if vector is None else vector.data_ptr() for vector in vectors),
        model.windows[index] or 0,
        model.chunks[index] or 0,
        place.group,
        place.slot,
        list(model.ropes).index(model.rope_kinds[index]),
        isinstance(mlp, DenseShape) and mlp.by_gelu,
        ctypes.pointer(_sparse(layer.mlp, routers[layer.mlp]))
        if isinstance(layer.mlp, MixtureOfExperts)
        else None,
    )


def _router(mlp: MixtureOfExperts, gemm: CompiledGemm) -> PackedWeightLinear:
    return PackedWeightLinear(Weight16(mlp.router.weight, gemm), mlp.router.bias, gemm)


def _sparse(mlp: MixtureOfExperts, router: PackedWeightLinear) -> _Sparse:
    routing = mlp.shape.routing
    correction = mlp.router.correction
    assert isinstance(mlp.experts, PackedExperts)
    return _Sparse(
        _Router(
            router.address(),
            None if correction is None else correction.data_ptr(),
            routing.experts_per_token,
            routing.normalized,
            routing.rounded,
            routing.num_groups,
            routing.num_top_groups,
            routing.scale,
        ),
        mlp.experts.address(),
    )


def _cores(cores: Sequence[frozenset[int]]) -> _Cores:
    if not cores:
        return _Cores()
    each = [_cpu_set(core) for core in cores]
    return _Cores(_cpu_set(usable_cpus()), (_CpuSet * len(each))(*each), len(each))


def _cpu_set(cpus: frozenset[int]) -> _CpuSet:
    return _CpuSet.from_buffer_copy(sum(1 << cpu for cpu in cpus).to_bytes(ctypes.sizeof(_CpuSet), "little"))


def _weight(module: nn.Module | None) -> WeightAddress:
    if module is None:
        return WeightAddress()
    assert isinstance(module, PackedWeightLinear | PackedEmbedding)
    return module.address()
