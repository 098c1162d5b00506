"""The experts that a mixture of experts sent tokens to, as arrays and as messages between processes.

Independent of models and requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

ExpertArray: TypeAlias = "npt.NDArray[np.unsignedinteger]"
"""[num_tokens, num_layers, experts_per_token], in the type of the model's RoutedExpertsSpec."""


@dataclass(frozen=True, slots=True)
class RoutedExpertsSpec:
    """The sizes of a model's routing."""

    num_layers: int
    """All layers of the model: those without experts are 0 throughout."""
    experts_per_token: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest type that holds the number of every expert: V1's choice."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.experts_per_token * self.dtype.itemsize

    def empty(self, num_tokens: int) -> ExpertArray:
        """An array of zeros for ``num_tokens`` tokens; memory is taken as it is written."""
        return np.zeros((num_tokens, self.num_layers, self.experts_per_token), self.dtype)


@dataclass(frozen=True, slots=True)
class StepRouting:
    """The experts chosen in one step."""

    slots: npt.NDArray[np.int64]
    """[num_tokens] where the KV of each token is: block * block_size + offset."""
    experts: ExpertArray


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The experts of a request's tokens, as a message."""

    shape: tuple[int, int, int]
    dtype: str
    data: bytes

    @classmethod
    def of(cls, experts: ExpertArray) -> RoutedExperts:
        num_tokens, num_layers, per_token = experts.shape
        return cls((num_tokens, num_layers, per_token), experts.dtype.name, experts.tobytes())

    def array(self) -> ExpertArray:
        """The array, over the message's bytes: it cannot be written to."""
        array: ExpertArray = np.frombuffer(self.data, self.dtype).reshape(self.shape)
        return array
