"""Parameters of a request to a pooling model, properties of the model, and its answer."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from engine.errors import RequestError

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
WHOLE_PROMPT_TASKS = ("token_embed", "token_classify")
"""Tasks whose answer has a row per token of the prompt."""


class PoolingParams(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, kw_only=True):
    """The counterpart of ``SamplingParams`` for pooling models, with V1's names."""

    task: PoolingTask | None = None
    """``embed`` | ``classify`` | ``token_embed`` | ``token_classify``; None: the model's first."""
    dimensions: int | None = None
    """Length to which embeddings are cut, and normalized again; None: not cut."""
    use_activation: bool | None = None
    """Whether to normalize embeddings, or turn logits into probabilities; None: the model's default."""
    first_segment: int | None = None
    """Number of tokens of the first of two texts, if the model distinguishes them; None: there is one
    text."""

    def checked(self, model: PoolingModel) -> PoolingParams:
        """Returns these parameters with the task filled in. RequestError if the model does not support
        them."""
        task = self.task or model.tasks[0]
        if task not in model.tasks:
            raise RequestError(f"task must be one of {', '.join(model.tasks)}, got {task!r}.", "task")
        if self.dimensions is not None:
            if task not in ("embed", "token_embed"):
                raise RequestError(f"dimensions is not for task {task!r}.", "dimensions")
            model.check_dimensions(self.dimensions)
        return msgspec.structs.replace(self, task=task)


class PoolingModel(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, kw_only=True):
    """Properties of a pooling model; API server processes receive them."""

    tasks: tuple[PoolingTask, ...]
    """The supported tasks; the first is the default."""
    size: int
    """Length of its embeddings, or its number of classes."""
    labels: tuple[str, ...] = ()
    """Names of its classes."""
    matryoshka: tuple[int, ...] = ()
    """The only lengths to which embeddings may be cut; empty: any."""
    may_cut: bool = True
    """Whether embeddings may be cut at all."""
    prompts: dict[str, str] = {}
    """Texts that are put before an input, by their names in the model's folder."""
    default_prompt: str | None = None
    """Name of the prompt for an input that names none."""
    in_chat: bool = False
    """Whether a text is put into the chat template as the user's message, and its prompt as the system's."""
    joins_pairs: bool = False
    """Whether the two texts of a pair are concatenated: the client has put them into the model's format."""
    lowercases: bool = False
    """Whether texts are converted to lower case before they are tokenized."""
    tells_segments: bool = False
    """Whether the model takes as input which tokens belong to the second of two texts."""
    whole_prompts: bool = False
    """Whether a prompt must be computed in one step, because each token attends to all."""
    caches_prefixes: bool = True
    """Whether a prompt may reuse cached KV of another's prefix; not if all its tokens are pooled."""

    @property
    def is_cross_encoder(self) -> bool:
        """Whether the model reads a pair of texts together and scores it."""
        return "classify" in self.tasks and self.size == 1

    def check_dimensions(self, dimensions: int) -> None:
        """Raises RequestError unless embeddings may be cut to this length."""
        if not self.may_cut and dimensions != self.size:
            raise RequestError(
                f"dimensions must be {self.size}: this model's embeddings cannot be cut.", "dimensions"
            )
        if self.matryoshka and dimensions not in self.matryoshka:
            allowed = ", ".join(map(str, self.matryoshka))
            raise RequestError(f"dimensions must be one of {allowed}, got {dimensions}.", "dimensions")
        if not 1 <= dimensions <= self.size:
            raise RequestError(f"dimensions must be from 1 to {self.size}, got {dimensions}.", "dimensions")


class Pooled(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a pooling model to one prompt."""

    shape: tuple[int, ...]
    data: bytes
    """Numbers in fp32, little-endian."""

    @classmethod
    def of(cls, array: npt.NDArray[np.float32]) -> Pooled:
        return cls(array.shape, np.ascontiguousarray(array, "<f4").tobytes())

    def array(self) -> npt.NDArray[np.float32]:
        """Array [size], or [num_tokens, size] of a task that answers for each token."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)
