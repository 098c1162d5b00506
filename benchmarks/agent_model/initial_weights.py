"""Initial weights in which two layers already copy, so that training need not discover how.

A transformer copies a name with two consecutive attention heads ("induction heads", arXiv 2209.11895): the
lower one writes to each token which token came before it; the upper one finds the place whose previous token
is the present one, and predicts the token there. From random weights, a small network discovers this late.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.agent_model.network import Network

SHARPNESS = 3.0
"""Scale of the queries in the attention of the first two layers."""
_EMBEDDING_STD = 0.02
_CONSTANT = 0.13
"""Value of every embedding in its first channel, for heads that look at positions alone."""


def initialize(network: Network) -> None:
    """Sets random weights, then heads that see earlier tokens (layer 0) and heads that copy (layer 1)."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            added = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (
                _EMBEDDING_STD if "embed" in name else parameter.shape[1] ** -0.5 * (0.02 if added else 1.0)
            )
            nn.init.normal_(parameter, std=scale)
    with torch.no_grad():
        copying = _CopyingHeads(network)
        copying.embed()
        copying.look_back()
        copying.copy()


class _CopyingHeads:
    """Half of the channels hold the token itself; the first layer writes earlier tokens to the others."""

    def __init__(self, network: Network) -> None:
        shape = network.shape
        self._decoder = network.model
        self._hidden = shape.hidden_size
        self._head_dim = shape.head_dim
        self._heads = shape.num_attention_heads
        self._kv_heads = shape.num_key_value_heads
        self._half = shape.hidden_size // 2
        self._frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        # What a head reads from a token: [head_dim, hidden], orthogonal rows over the token's channels.
        read = torch.zeros(self._head_dim, self._hidden)
        nn.init.orthogonal_(read[:, 1 : self._half])
        self._read = read

    def embed(self) -> None:
        weight = self._decoder.embed_tokens.weight
        weight[:, self._half :] *= 0.2
        weight[:, 0] = _CONSTANT

    def look_back(self) -> None:
        """Makes head h of the first layer copy the token h + 1 places back to separate channels."""
        attention = self._decoder.attention(0)
        attention.q_norm.weight.fill_(SHARPNESS)
        group = self._heads // self._kv_heads
        key = self._wave(0.0)
        for head in range(self._heads):
            rows = self._rows(head)
            attention.q_proj.weight[rows] *= 0.05
            attention.q_proj.weight[rows, 0] = self._wave(-1.0 - head)
            if head % group == 0:
                rows = self._rows(head // group)
                attention.k_proj.weight[rows] *= 0.05
                attention.k_proj.weight[rows, 0] = key
                attention.v_proj.weight[rows] = self._read
        for head in range(self._heads):
            attention.o_proj.weight[:, self._rows(head)] = 0.03 * self._place(head)

    def copy(self) -> None:
        """Makes the second layer's keys the previous one or two tokens; its values are the token itself."""
        attention = self._decoder.attention(1)
        attention.q_norm.weight.fill_(SHARPNESS)
        slow = self._slow_channels()
        half = len(slow) // 2
        present = self._read
        before = self._place(0).T
        two_before = self._place(1).T
        queries = (present[: 2 * half], torch.cat([present[:half], before[:half]]))
        keys = (before[: 2 * half], torch.cat([before[:half], two_before[:half]]))
        for kv_head in range(self._kv_heads):
            rows = self._rows(kv_head)
            attention.k_proj.weight[rows] *= 0.05
            attention.k_proj.weight[rows][slow[: 2 * half]] = keys[kv_head % 2]
            attention.v_proj.weight[rows] = present
        for head in range(self._heads):
            rows = self._rows(head)
            attention.q_proj.weight[rows] *= 0.05
            attention.q_proj.weight[rows][slow[: 2 * half]] = queries[
                head * self._kv_heads // self._heads % 2
            ]
            attention.o_proj.weight[:, rows] = 0.03 * present.T

    def _rows(self, head: int) -> slice:
        return slice(head * self._head_dim, (head + 1) * self._head_dim)

    def _wave(self, offset: float) -> Tensor:
        """A query or key [head_dim] that, by the rotary embedding, matches its like best at this distance."""
        half = self._head_dim // 2
        weight = torch.where(self._frequencies > 0.02, 1.0, 0.0)
        angle = self._frequencies * offset
        return torch.cat([weight * angle.cos(), weight * angle.sin()]).reshape(2 * half)

    def _slow_channels(self) -> Tensor:
        """Returns channels of a head that the rotary embedding hardly rotates within a conversation."""
        slow = (self._frequencies < 2e-3).nonzero().flatten()
        return torch.cat([slow, slow + self._head_dim // 2])

    def _place(self, head: int) -> Tensor:
        """[hidden, head_dim]: where a head of the first layer writes; the first two overlap with no other."""
        place = torch.zeros(self._hidden, self._head_dim)
        start = self._half + (head % 2) * self._head_dim
        if head < 2:
            place[start : start + self._head_dim] = torch.eye(self._head_dim)
        else:
            nn.init.orthogonal_(place[self._half :])
            place *= 0.3
        return place
