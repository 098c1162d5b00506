"""The requested output format: OpenAI's ``response_format``, V1's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.errors import RequestError
from engine.records.structured_outputs import StructuredOutputsParams


class JsonSchemaFormat(BaseModel):
    """A named schema, as OpenAI's clients send it."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Whether an unenforceable part of the schema is an error; otherwise it is ignored."""


FORM_WORDS = ("schema", "json_schema", "grammar", "regex", "pattern", "definition")
"""Fields that describe a format. One that its type does not use would be ignored, so it is refused."""


class ResponseFormat(BaseModel):
    """``text``, any JSON object, JSON of a schema, or V1's structural tags."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = {**(self.model_extra or {}), "json_schema": self.json_schema}
        refuse_other_forms("response_format", self.type, given, taken=("json_schema",))
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError(
                "response_format of type 'json_schema' needs json_schema.", "response_format.json_schema"
            )
        return self

    def params(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            tag = {**(self.model_extra or {}), "type": self.type}
            return StructuredOutputsParams(structural_tag=tag, asked_in="response_format")
        if self.type == "json_object" or self.json_schema is None:
            return StructuredOutputsParams(json_object=True, asked_in="response_format")
        return StructuredOutputsParams(
            json=self.json_schema.schema_,
            lenient=not self.json_schema.strict,
            asked_in="response_format.json_schema.schema",
        )


def refuse_other_forms(field: str, kind: str, given: Mapping[str, object], taken: Sequence[str]) -> None:
    """Raises RequestError for a field that the format's type does not use; type "json_schema" may use those
    in ``taken``."""
    for word in FORM_WORDS:
        if given.get(word) is not None and not (kind == "json_schema" and word in taken):
            raise RequestError(f"{field}.{word} needs type 'json_schema', not {kind!r}.", f"{field}.{word}")


class StructuredOutputs(BaseModel):
    """Exactly one of the first six; each is described at ``StructuredOutputsParams``."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            json=self.json_,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
            disable_any_whitespace=self.disable_any_whitespace,
            whitespace_pattern=self.whitespace_pattern,
        )


def wanted_output(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """The output format set by either field; RequestError if both are set."""
    by_format = None if response_format is None else response_format.params()
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError(
            "response_format and structured_outputs both set the output format; send one.",
            "structured_outputs",
        )
    return structured_outputs.params()
