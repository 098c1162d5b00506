"""The learned models, as a trainer writes them and a core reads them."""

from __future__ import annotations

import msgspec

from estimator.learned.duration_model import PREDICTS, DurationModel, check_durations
from estimator.learned.trees import ModelError
from estimator.learned.work_model import WorkModel, check_model

Model = WorkModel | DurationModel


class _Head(msgspec.Struct):
    """The field that distinguishes the models; a model of remaining work omits it."""

    predicts: str = ""


def encode_model(model: Model) -> bytes:
    return msgspec.json.encode(model)


def decode_model(data: bytes | str) -> Model:
    """Decodes any model; ModelError if it cannot be used."""
    try:
        is_of_calls = msgspec.json.decode(data, type=_Head).predicts == PREDICTS
    except (ValueError, RecursionError) as error:
        raise ModelError(f"it is no model: {error}") from error
    return decode_durations(data) if is_of_calls else decode_work(data)


def decode_work(data: bytes | str) -> WorkModel:
    """Decodes a model of remaining work; ModelError if it cannot be used."""
    try:
        model = msgspec.json.decode(data, type=WorkModel)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"it is no model of remaining work: {error}") from error
    check_model(model)
    return model


def decode_durations(data: bytes | str) -> DurationModel:
    """Decodes a model of calls' durations; ModelError if it cannot be used."""
    try:
        model = msgspec.json.decode(data, type=DurationModel)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"it is no model of calls' durations: {error}") from error
    check_durations(model)
    return model
