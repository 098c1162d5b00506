"""What may be sent to a server beyond the OpenAI API, and how a turn is written for it. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, str]
"""``role`` and ``content``, as the API has them."""


class Identity(StrEnum):
    """How a turn says which job it belongs to."""

    JOB_ID = "job_id"
    """A field of the body, with ``is_last_step``."""
    SESSION_ID = "session_id"
    """A field of the body, as V1 and its clients have it."""
    SESSION_HEADER = "X-Session-ID"
    NONE = "none"
    """Not at all, as an agent that knows nothing of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn to send: messages go to the chat endpoint, token ids to the completions endpoint."""

    prompt: list[Message] | list[int]
    max_tokens: int
    forced_token_ids: list[int] | None = None
    """What the server must answer; None lets its model speak."""
    job_id: str | None = None
    is_last_step: bool = False
    tools: tuple[str, ...] = ()
    """Names of functions to declare, so that the server reads calls out of the answer."""

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt[0], dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The extensions that a kind of server takes. One that it does not know it may refuse."""

    name: str
    forces_tokens: bool = False
    """``replay_token_ids``: the answer is given, the model only computes it."""
    fixes_length: bool = False
    """``ignore_eos`` and ``min_tokens``: an answer is exactly as long as asked for."""
    returns_token_ids: bool = False
    """``return_token_ids``: the answer comes as token ids too."""
    default_identity: Identity = Identity.NONE

    def body(self, model: str, turn: TurnRequest, identity: Identity) -> dict[str, Any]:
        """The request body; with ``Identity.NONE`` nothing in it tells the job."""
        body: dict[str, Any] = {
            "model": model,
            "messages" if turn.is_chat else "prompt": turn.prompt,
            "max_tokens": turn.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if turn.tools:
            body["tools"] = [_function(name) for name in turn.tools]
        if turn.forced_token_ids is not None:
            body["replay_token_ids"] = turn.forced_token_ids
        elif self.fixes_length:
            body |= {"ignore_eos": True, "min_tokens": turn.max_tokens}
        if self.returns_token_ids:
            body["return_token_ids"] = True
        if identity is Identity.JOB_ID and turn.job_id is not None:
            body |= {"job_id": turn.job_id, "is_last_step": turn.is_last_step}
        elif identity is Identity.SESSION_ID and turn.job_id is not None:
            body["session_id"] = turn.job_id
        return body

    @staticmethod
    def headers(turn: TurnRequest, identity: Identity) -> dict[str, str]:
        """Headers that tell the job, if any do."""
        if identity is Identity.SESSION_HEADER and turn.job_id is not None:
            return {Identity.SESSION_HEADER.value: turn.job_id}
        return {}


CONTINUUM = Dialect(
    name="continuum",
    forces_tokens=True,
    fixes_length=True,
    returns_token_ids=True,
    default_identity=Identity.JOB_ID,
)
OPENAI = Dialect(name="openai")
"""Any server of which nothing is known: standard fields only."""
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        CONTINUUM,
        Dialect(name="vllm", fixes_length=True, returns_token_ids=True),
        Dialect(name="sglang", fixes_length=True),
        OPENAI,
    )
}


def dialect_of(owned_by: str | None) -> Dialect:
    """The dialect of a server by what its model cards say in ``owned_by``."""
    return DIALECTS.get(owned_by or "", OPENAI)


def _function(name: str) -> dict[str, Any]:
    """A declaration that takes any arguments."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
