"""The kinds of servers: their extensions of the OpenAI API, and the request format of each. No HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, str]
"""A message with ``role`` and ``content``."""


class Identity(StrEnum):
    """How a request names its job."""

    JOB_ID = "job_id"
    """The body's ``job_id``, with ``is_last_step``."""
    SESSION_ID = "session_id"
    """The body's ``session_id``, as with vLLM and its clients."""
    SESSION_HEADER = "X-Session-ID"
    NONE = "none"
    """Jobs are not named, like those of an agent that does not know about jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn to send: messages go to the chat endpoint, token ids to the completions endpoint."""

    prompt: list[Message] | list[int]
    max_tokens: int
    forced_token_ids: list[int] | None = None
    """The response to force; None: the model generates it."""
    job_id: str | None = None
    is_last_step: bool = False
    tools: tuple[str, ...] = ()
    """Names of functions to declare, so that the server parses calls."""

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt[0], dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerType:
    """A kind of server and the extensions it takes; a server may refuse one that it does not know."""

    name: str
    forces_tokens: bool = False
    """``replay_token_ids``: the output is given, and the model only computes it."""
    fixes_length: bool = False
    """``ignore_eos`` and ``min_tokens``: the output is exactly as long as requested."""
    returns_token_ids: bool = False
    """``return_token_ids``: the response includes its token ids."""
    default_identity: Identity = Identity.NONE

    def body(self, model: str, turn: TurnRequest, identity: Identity) -> dict[str, Any]:
        """The request body; with ``Identity.NONE`` it does not name the job."""
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
        """Returns the headers that name the job, if any do."""
        if identity is Identity.SESSION_HEADER and turn.job_id is not None:
            return {Identity.SESSION_HEADER.value: turn.job_id}
        return {}


CONTINUUM = ServerType(
    name="continuum",
    forces_tokens=True,
    fixes_length=True,
    returns_token_ids=True,
    default_identity=Identity.JOB_ID,
)
OPENAI = ServerType(name="openai")
"""Any other server: standard fields only."""
SERVER_TYPES = {
    server_type.name: server_type
    for server_type in (
        CONTINUUM,
        ServerType(name="vllm", fixes_length=True, returns_token_ids=True),
        ServerType(name="sglang", fixes_length=True),
        OPENAI,
    )
}


def server_type_of(owned_by: str | None) -> ServerType:
    """Returns the type of a server, by ``owned_by`` of its model cards."""
    return SERVER_TYPES.get(owned_by or "", OPENAI)


def _function(name: str) -> dict[str, Any]:
    """A function declaration that takes any arguments."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
