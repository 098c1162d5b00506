"""Maps the linears of a checkpoint to a decoder's joined ones, and to the part of them that a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

from engine.worker.lora.adapter_folder import LowRankWeights
from engine.worker.models.layer import DecoderLayer, renamed
from engine.worker.models.mixers.attention import SelfAttention
from engine.worker.models.mixers.attention_beside_state import AttentionBesideState
from engine.worker.models.mixers.kv_sharing_attention import KvSharingAttention
from engine.worker.models.mlp import GatedMLP
from engine.worker.models.shape import DecoderShape


class JoinedLinear(IntEnum):
    """The linears of a layer, as they are computed; in the order of the compiled step."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


NUM_JOINED = len(JoinedLinear)


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint's linear within a joined one, and a rank's part of it."""

    linear: int
    """A JoinedLinear, or in a model of transformers the linear's number in its layer."""
    first: int
    """The index of its first output in the joined linear."""
    num_outputs: int
    """The number of outputs that the rank has."""
    num_inputs: int
    """The number of inputs that the rank has."""
    part: int = 0
    num_parts: int = 1
    by_inputs: bool = False

    def part_of(self, weights: LowRankWeights) -> LowRankWeights | None:
        """The rank's part of the adapter's weights; None if the sizes do not fit."""
        down = weights.down
        up = weights.up
        if self.by_inputs:
            down = _part(down, 1, self.num_inputs, self.part, self.num_parts)
        else:
            up = _part(up, 0, self.num_outputs, self.part, self.num_parts)
        if down.shape[1] != self.num_inputs or len(up) != self.num_outputs:
            return None
        return LowRankWeights(down, up, weights.scale)


def _part(weight: torch.Tensor, dim: int, size: int, part: int, num_parts: int) -> torch.Tensor:
    """A part, or the whole if it does not consist of ``num_parts`` parts of this size."""
    if weight.shape[dim] != size * num_parts:
        return weight
    return weight.narrow(dim, size * part, size)


def places_of(layer: DecoderLayer, shape: DecoderShape, rank: int, size: int) -> dict[str, Place]:
    """The places of a layer's linears that adapters may change, by their names in a checkpoint."""
    places: dict[str, Place] = {}
    mixer = layer.attention
    attention = mixer.attention if isinstance(mixer, AttentionBesideState) else mixer
    if isinstance(attention, KvSharingAttention):
        places |= _sharing_places(attention, shape.hidden_size, rank, size)
    elif isinstance(attention, SelfAttention):
        places |= _attention_places(attention, shape.hidden_size, rank, size)
    if isinstance(layer.mlp, GatedMLP):
        named = _mlp_places(layer.mlp, shape.hidden_size, rank, size)
        places |= {shape.mlp_prefix + name: place for name, place in named}
    return {_published(name, shape): place for name, place in places.items()}


def _published(name: str, shape: DecoderShape) -> str:
    """The name of a linear in a checkpoint."""
    return renamed(f"{name}.", shape.other_names).removesuffix(".")


def _attention_places(attention: SelfAttention, hidden: int, rank: int, size: int) -> dict[str, Place]:
    shape = attention.shape
    queries = attention.queries_size
    kv = shape.kv_size
    values = shape.values_size
    keys_end = attention.queries_size + shape.kv_size
    copies = shape.num_kv_copies
    qkv = JoinedLinear.QKV
    output = JoinedLinear.OUTPUT
    output_place = Place(output, 0, hidden, shape.attended_size, rank, size, by_inputs=True)
    if shape.joined_qkv:  # of several ranks none has all that its checkpoint's linear is made of
        whole = {} if size > 1 else {"self_attn.qkv_proj": Place(qkv, 0, keys_end + values, hidden)}
        return {**whole, "self_attn.o_proj": output_place}
    return {
        "self_attn.q_proj": Place(qkv, 0, queries, hidden, rank, size),
        "self_attn.k_proj": Place(qkv, queries, kv, hidden, rank // copies, size // copies),
        "self_attn.v_proj": Place(qkv, keys_end, values, hidden, rank // copies, size // copies),
        "self_attn.o_proj": output_place,
    }


def _sharing_places(attention: KvSharingAttention, hidden: int, rank: int, size: int) -> dict[str, Place]:
    """The places of an attention that may have no keys, or no values, of its own."""
    shape = attention.shape
    copies = shape.num_kv_copies
    queries = shape.query_size
    kv = shape.kv_size
    qkv = JoinedLinear.QKV
    places = {
        "self_attn.q_proj": Place(qkv, 0, queries, hidden, rank, size),
        "self_attn.o_proj": Place(JoinedLinear.OUTPUT, 0, hidden, queries, rank, size, by_inputs=True),
    }
    if attention.has_keys:
        places["self_attn.k_proj"] = Place(qkv, queries, kv, hidden, rank // copies, size // copies)
    if attention.has_values:
        places["self_attn.v_proj"] = Place(qkv, queries + kv, kv, hidden, rank // copies, size // copies)
    return places


def _mlp_places(mlp: GatedMLP, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Place]]:
    inner = mlp.intermediate_size
    if mlp.is_joined:
        if size == 1:
            yield "gate_up_proj", Place(JoinedLinear.GATE_UP, 0, 2 * inner, hidden)
    else:
        yield "gate_proj", Place(JoinedLinear.GATE_UP, 0, inner, hidden, rank, size)
        yield "up_proj", Place(JoinedLinear.GATE_UP, inner, inner, hidden, rank, size)
    yield "down_proj", Place(JoinedLinear.DOWN, 0, hidden, inner, rank, size, by_inputs=True)
