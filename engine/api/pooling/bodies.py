"""Bodies and responses of the endpoints of pooling models: OpenAI's for embeddings, Cohere's and Jina's for
ranks, V1's for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.api.field_names import one_of
from engine.api.openai.protocol import Int64, ListOf, TokenId
from engine.api.service.identity import ClientIdentity
from engine.errors import RequestError
from engine.records.pooling import PoolingParams, PoolingTask

Item = TypeVar("Item")

MAX_INPUTS = 4096
"""Maximum number of texts, or pairs of texts, of one request."""
_Texts = Annotated[str | ListOf[str], one_of("this field", "a string or a list of strings")]
_Input = Annotated[
    str | ListOf[TokenId] | ListOf[str] | ListOf[ListOf[TokenId]],
    one_of("input", "a string, a list of token ids, or a list of strings or of lists of token ids"),
]


class PoolingBody(BaseModel):
    """Fields that all of these bodies may have; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    user: Any = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    """An older name of ``use_activation``."""
    activation: bool | None = None
    """Another older name of ``use_activation``."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Removes fields that are null: clients send null for fields that they do not set."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    def identity(self) -> ClientIdentity:
        return ClientIdentity(tenant=self.user, priority=self.priority, cache_salt=self.cache_salt)

    def params(self, task: PoolingTask | None, dimensions: int | None = None) -> PoolingParams:
        given = (self.use_activation, self.normalize, self.activation)
        use_activation = next((value for value in given if value is not None), None)
        return PoolingParams(task=task, dimensions=dimensions, use_activation=use_activation)


class InputBody(PoolingBody):
    """A body with one input or several, or with a chat, which is one."""

    input: _Input | None = None
    messages: ListOf[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = True
    """Applies to texts in ``input``; a chat has the special tokens of its template."""
    prompt_name: str | None = None
    """Name of a text in the model's folder that is put before each input."""

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.messages is None:
            if self.input is None:
                raise RequestError("Give input, or messages.", "input")
            _check_items(self.inputs() if self.input else [], "input")
        elif self.input is not None:
            raise RequestError("Give either input or messages.", "messages")
        elif self.prompt_name is not None:
            raise RequestError("prompt_name is for input, not for messages.", "prompt_name")
        return self

    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list; empty if there is a chat."""
        if isinstance(self.input, str):
            return [self.input]
        given: list[int] | list[str] | list[list[int]] = [] if self.input is None else self.input
        many: list[str | list[int]] = []
        for item in given:
            if isinstance(item, int):
                return [[token for token in given if isinstance(token, int)]]
            many.append(item)
        return many


class EmbeddingRequest(InputBody):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class PoolingRequest(EmbeddingRequest):
    """Body of POST /pooling."""

    task: PoolingTask | None = None


class ClassificationRequest(InputBody):
    """Body of POST /classify."""


class ScoreRequest(PoolingBody):
    """Body of POST /score: V1's names, each in two spellings."""

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    items: _Texts | None = None

    def firsts(self) -> list[str]:
        return _texts({"queries": self.queries, "text_1": self.text_1, "data_1": self.data_1})

    def seconds(self) -> list[str]:
        return _texts(
            {"documents": self.documents, "text_2": self.text_2, "data_2": self.data_2, "items": self.items}
        )


class RankedText(BaseModel):
    """A document with other fields, which are ignored."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankRequest(PoolingBody):
    """Body of POST /rerank, as Cohere's and Jina's clients send it."""

    query: str
    documents: ListOf[str | RankedText]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Maximum number of results; none or 0: all."""
    max_tokens_per_doc: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Maximum number of tokens of each document that are read; none or 0: all."""
    return_documents: bool = True

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        _check_items(self.documents, "documents")
        return self

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _texts(by_name: Mapping[str, str | list[str] | None]) -> list[str]:
    """The texts of the one field that is set."""
    given = {name: value for name, value in by_name.items() if value is not None}
    names = " or ".join(by_name)
    first = next(iter(by_name))
    if len(given) != 1:
        raise RequestError(f"One of {names} must be given, got {len(given)}.", first)
    [(name, value)] = given.items()
    texts = [value] if isinstance(value, str) else value
    _check_items(texts, name)
    return texts


def _check_items(items: Sequence[object], field: str) -> None:
    if not items:
        raise RequestError(f"{field} must not be empty.", field)
    if len(items) > MAX_INPUTS:
        raise RequestError(f"{field} must have at most {MAX_INPUTS} items, got {len(items)}.", field)


# ---- responses ----


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class PooledList(msgspec.Struct, Generic[Item], kw_only=True):
    """The answers to the inputs of a request, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Item]
    usage: PoolingUsage


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or fp32 in base64."""


class PooledData(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class ClassOfInput(msgspec.Struct, kw_only=True):
    index: int
    label: str
    """The most probable class."""
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class RankedDocument(msgspec.Struct, kw_only=True):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    """The document's index in the request."""
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]
    """Results, the best first."""
