"""The experts of a request's tokens as a field of a choice, in vLLM's encoding."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO

import numpy as np
from msgspec import UNSET, UnsetType

from engine.records.routed_experts import ExpertArray


def encoded_experts(experts: ExpertArray | None) -> str | UnsetType:
    """The bytes of a ``.npy`` file in base64; unset without experts. experts [num_tokens - 1, num_layers,
    experts_per_token]"""
    if experts is None:
        return UNSET
    file = BytesIO()
    np.save(file, experts, allow_pickle=False)
    return b64encode(file.getbuffer()).decode("ascii")
