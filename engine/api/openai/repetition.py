"""The field of a body that ends repetitive outputs."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from engine.records.sampling_params import RepetitionDetection

_Count = Annotated[int, Field(ge=0, lt=2**31)]


class RepetitionDetectionFields(BaseModel):
    """See ``RepetitionDetection``."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: _Count = 0
    min_pattern_size: _Count = 0
    min_count: _Count = 0

    def params(self) -> RepetitionDetection | None:
        """The parameters; None if it is off, for which V1 sends zeros."""
        if not (self.max_pattern_size or self.min_count):
            return None
        return RepetitionDetection(**self.model_dump())
