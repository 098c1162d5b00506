"""Maps the engine's field names to those that an API's clients use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from engine.errors import RequestError


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field of a RequestError to what the client sent."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.field or "")
        if name is not None:
            error.args = (re.sub(rf"^{error.field}\b", name, str(error)), *error.args[1:])
            error.field = name
        raise


def one_of(field: str, shapes: str) -> WrapValidator:
    """Replaces pydantic's errors of each variant of a union by one sentence."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise RequestError(f"{field} must be {shapes}.", field) from None

    return WrapValidator(check)
