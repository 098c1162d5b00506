"""Reads a request's context: its job, tenant, priority and cache salt, from body and headers.

It is independent of the API: an endpoint fills in a ``ClientIdentity``. A job that the client does
not name is inferred later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any

import msgspec

from engine.api.http.auth import KEY_NAME, OWNER_HEADER
from engine.errors import RequestError
from engine.records.messages import JobRef, RequestContext
from engine.tokenization.unicode_text import is_unicode

MAX_ID_CHARS = 512
MAX_USER_ID_CHARS = 4096
"""Maximum length of ``metadata.user_id``, which may be JSON with a session in it."""
MIN_DEADLINE_S = 0.001
MAX_DEADLINE_S = 86_400
LAST_STEP_HEADERS = ("x-is-last-step", "x-dynamo-session-final")

SESSION_HEADERS = ("x-session-id",)
CLAUDE_CODE_HEADERS = ("x-claude-code-session-id",)
CLAUDE_CODE_AGENT = ("x-claude-code-agent-id",)
"""Sent by the sub-agents of a session, since version 2.1.139; the main agent sends none."""
CLAUDE_CODE_PARENT = ("x-claude-code-parent-agent-id",)
CLIENT_HEADERS = (
    "thread-id",
    "thread_id",
    "session-id",
    "session_id",
    "conversation-id",
    "conversation_id",
    "x-opencode-session",
    "x-session-affinity",
    "x-correlation-id",
)
"""Headers of Codex (whose sub-agents have threads of their own in the session of the first one, since
version 0.147), OpenCode and load generators; the first one present is used."""
GATEWAY_HEADERS = ("x-dynamo-session-id", "x-smg-routing-key", "x-aibrix-session-key")
"""Session headers of gateways: Dynamo 1.6, SGLang's model gateway, AIBrix (its pull request 2742). Not
``x-session-token`` of llm-d's session affinity: it is the name of a pod, which all its sessions send."""
PARENT_HEADERS = ("x-parent-session-id", "x-codex-parent-thread-id", "x-dynamo-parent-session-id")
"""Headers with the session that waits for this one: of OpenCode, Codex (its pull request to Dynamo, 12331)
and Dynamo."""
TENANT_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Headers of llm-d's router and of the Gateway API inference extension with the flow that shares fairly: a
user or a tenant, with many jobs."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C's format, version 00. Later versions may append fields."""
_OWNED = re.compile(rf"{KEY_NAME}:")
_SESSION_IN_USER_ID = re.compile(r"_session_([^\s_][^\s]*)$")
_TRUE = frozenset(("1", "true", "yes", "on"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIdentity:
    """The fields of a body that identify its job, unvalidated: ``identify`` checks the types."""

    job_id: object = None
    parent_job_id: object = None
    """The job that waits for this one."""
    is_last_step: object = None
    xargs: object = None
    """``vllm_xargs``: extra arguments, for clients that cannot add fields."""
    session_id: object = None
    metadata_user_id: object = None
    """Anthropic's ``metadata.user_id``; Claude Code puts its session there."""
    prompt_cache_key: object = None
    conversation: object = None
    """The conversation's id, or an object that holds it."""
    previous_job_id: str | None = None
    """The job of the previous response, which this request continues."""
    tenant: object = None
    """The body's ``user``."""
    priority: int | None = None
    cache_salt: str | None = None
    asked_ttl_s: float | None = None
    """How long the client requests to keep the turn's KV."""
    deadline_s: object = None
    """Seconds from the request's arrival after which its answer is of no use."""
    prewarms: bool = False
    """Whether the prompt is only cached, and nothing is answered."""
    streams: bool = False
    """Whether the client receives parts of the answer before it is complete."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """Which of its KV another server has, or will get; see ``engine.api.kv_transfer``."""


def request_context(
    headers: Mapping[str, str],
    identity: ClientIdentity,
    *,
    separates_owners: bool = False,
    keeps_alive: bool = True,
    job_headers: tuple[str, ...] = (),
) -> RequestContext:
    """Returns the context of a request, which goes to the core unchanged; RequestError as in ``identify``.

    ``separates_owners``: owners of API keys share no cached prefixes, so the salt includes the owner.
    ``keeps_alive``: a stream sends keep-alives while it waits. ``job_headers``: see ``identify``.
    """
    job = identify(headers, identity, job_headers)
    if not (identity.streams and keeps_alive):
        job = msgspec.structs.replace(job, is_silent=True)
    salt = identity.cache_salt
    if separates_owners and not (job.owner is None and salt is None):
        # Both are encoded, so that no salt of a client can equal that of another owner.
        salt = msgspec.json.encode((job.owner, salt)).decode()
    return RequestContext(job=job, priority=identity.priority or 0, cache_salt=salt)


def identify(
    headers: Mapping[str, str], identity: ClientIdentity, job_headers: tuple[str, ...] = ()
) -> JobRef:
    """Returns the job of a turn, with the id None if the request names none. ``headers``: lower-case names,
    or a case-insensitive mapping. ``job_headers``: the operator's own names of session headers.

    RequestError for a field of the wrong type or length. Headers are not validated, since proxies add them
    too: a long value is hashed.
    """
    xargs = _mapping(identity.xargs, "vllm_xargs")
    job_id = next(_ids(headers, identity, xargs, job_headers), None)
    parent_id = next(_parents(headers, identity, xargs), None)
    if job_id is None or parent_id == job_id:
        parent_id = None
    return JobRef(
        None if job_id is None else owned_id(headers, job_id),
        _is_last_step(headers, identity, xargs),
        _tenant(headers, identity),
        traceparent=_traceparent(headers),
        owner=owner_of(headers),
        asked_ttl_s=identity.asked_ttl_s,
        deadline_s=_deadline_s(identity, xargs),
        parent_id=None if parent_id is None else owned_id(headers, parent_id),
        prewarms=identity.prewarms,
    )


def _ids(
    headers: Mapping[str, str],
    identity: ClientIdentity,
    xargs: Mapping[str, object],
    job_headers: tuple[str, ...],
) -> Iterator[str]:
    """Yields all ids that the request names, in order of precedence."""
    user_id = _text(identity.metadata_user_id, "metadata.user_id", MAX_USER_ID_CHARS)
    agent = _from_headers(headers, CLAUDE_CODE_AGENT)
    yield from _known(
        _own_id(identity.job_id, "job_id"),
        _own_id(xargs.get("job_id"), "vllm_xargs.job_id"),
        _text(identity.session_id, "session_id"),
        _from_headers(headers, job_headers),
        _from_headers(headers, SESSION_HEADERS),
        _text(xargs.get("session_id"), "vllm_xargs.session_id"),
        _of_agent(_from_headers(headers, CLAUDE_CODE_HEADERS) or _session_of(user_id), agent),
        _from_headers(headers, CLIENT_HEADERS),
        _from_headers(headers, GATEWAY_HEADERS),
        _text(identity.prompt_cache_key, "prompt_cache_key"),
        _conversation(identity.conversation),
        identity.previous_job_id,
    )


def _parents(
    headers: Mapping[str, str], identity: ClientIdentity, xargs: Mapping[str, object]
) -> Iterator[str]:
    """Yields all ids of a parent that the request names, in order of precedence."""
    yield from _known(
        _own_id(identity.parent_job_id, "parent_job_id"),
        _own_id(xargs.get("parent_job_id"), "vllm_xargs.parent_job_id"),
        _from_headers(headers, PARENT_HEADERS),
    )
    session = _from_headers(headers, CLAUDE_CODE_HEADERS)
    if session is not None and _from_headers(headers, CLAUDE_CODE_AGENT) is not None:
        yield _of_agent(session, _from_headers(headers, CLAUDE_CODE_PARENT)) or session


def _of_agent(session: str | None, agent: str | None) -> str | None:
    """The job of an agent of Claude Code: the session's own, or that of its sub-agent."""
    return session if session is None or agent is None else _bounded(f"{session}/{agent}")


def _known(*ids: str | None) -> Iterator[str]:
    return (job_id for job_id in ids if job_id)


def with_history(
    context: RequestContext,
    messages: Sequence[Mapping[str, Any]],
    *,
    continues_last: bool = False,
    before: tuple[int, int] = (0, 0),
) -> RequestContext:
    """Adds the numbers of replies and tool results in the prompt, which let the policy distinguish a
    returning tool call from a side request. ``before``: their numbers before these messages."""
    if context.job is None:
        return context
    num_replies, num_results = counts_in(messages, continues_last=continues_last)
    job = msgspec.structs.replace(
        context.job, num_replies=before[0] + num_replies, num_results=before[1] + num_results
    )
    return msgspec.structs.replace(context, job=job)


def counts_in(messages: Sequence[Mapping[str, Any]], *, continues_last: bool = False) -> tuple[int, int]:
    """The numbers of replies and of tool results among the messages. ``continues_last``: the last one is a
    reply to be continued."""
    roles = [message.get("role") for message in messages]
    num_replies = sum(1 for role, _ in groupby(roles) if role == "assistant")
    if continues_last and roles and roles[-1] == "assistant":
        num_replies -= 1
    return num_replies, sum(1 for role in roles if role in ("tool", "function"))


# ---- the body ----


def _own_id(value: object, field: str) -> str | None:
    """Reads a field of our own API: an invalid id, even an empty one, is an error."""
    if value == "":
        raise _fault(field, f"must have 1 to {MAX_ID_CHARS} characters")
    return _text(value, field)


def _text(value: object, field: str, max_chars: int = MAX_ID_CHARS) -> str | None:
    """Reads a string, or a number as a string; None if it is missing."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        value = str(value)
    if not isinstance(value, str) or len(value) > max_chars:
        raise _fault(field, f"must be a string of at most {max_chars} characters")
    if not is_unicode(value):
        raise _fault(field, "holds a lone surrogate, which is not a character")
    return value


def _fault(field: str, what: str) -> RequestError:
    return RequestError(f"{field} {what}.", field.partition(".")[0])


def _mapping(value: object, field: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _fault(field, "must be an object")
    return value


def _conversation(value: object) -> str | None:
    if isinstance(value, Mapping):
        return _text(value.get("id"), "conversation.id")
    return _text(value, "conversation")


def _is_last_step(headers: Mapping[str, str], identity: ClientIdentity, xargs: Mapping[str, object]) -> bool:
    for value, field in (
        (identity.is_last_step, "is_last_step"),
        (xargs.get("is_last_step"), "vllm_xargs.is_last_step"),
    ):
        if value is not None:
            if not isinstance(value, bool | int):
                raise _fault(field, "must be true or false")
            return bool(value)
    return any(headers.get(name, "").strip().lower() in _TRUE for name in LAST_STEP_HEADERS)


def _deadline_s(identity: ClientIdentity, xargs: Mapping[str, object]) -> float | None:
    for value, field in (
        (identity.deadline_s, "deadline_s"),
        (xargs.get("deadline_s"), "vllm_xargs.deadline_s"),
    ):
        if value is None:
            continue
        seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if MIN_DEADLINE_S <= seconds <= MAX_DEADLINE_S:
            return float(seconds)
        raise _fault(field, f"must be a number of seconds from {MIN_DEADLINE_S} to {MAX_DEADLINE_S}")
    return None


# ---- metadata.user_id ----


@dataclass(frozen=True, slots=True)
class _UserId:
    """A user, and the user's session."""

    user: str | None = None
    session: str | None = None


def _session_of(user_id: str | None) -> str | None:
    return _read_user_id(user_id).session if user_id else None


def _read_user_id(user_id: str) -> _UserId:
    """Parses ``user_…_session_<uuid>``, or the JSON text of an object with a session_id; any other text is a
    user."""
    if user_id.startswith("{"):
        return _read_json_user_id(user_id)
    found = _SESSION_IN_USER_ID.search(user_id)
    if found is None:
        return _UserId(_bounded(user_id))
    return _UserId(_bounded(user_id[: found.start()]), _bounded(found[1]))


def _read_json_user_id(user_id: str) -> _UserId:
    try:
        fields = json.loads(user_id)
    except (ValueError, RecursionError):
        return _UserId(_bounded(user_id))
    session = fields.get("session_id")
    user = fields.get("account_uuid") or fields.get("device_id")
    return _UserId(_sound(user), _sound(session))


def _sound(value: object) -> str | None:
    return _bounded(value) if isinstance(value, str) and is_unicode(value) else None


# ---- headers ----


def _from_headers(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The first of these headers that has a value."""
    for name in names:
        value = _decoded(headers.get(name, "")).strip()
        if value:
            return _bounded(value)
    return None


def _traceparent(headers: Mapping[str, str]) -> str | None:
    """The client's trace context, if valid; an invalid one is ignored, as W3C requires."""
    found = _TRACEPARENT.match(headers.get("traceparent", "").strip())
    return None if found is None else found[0]


def _decoded(value: str) -> str:
    """Decodes a header, which HTTP defines as Latin-1 and clients send as UTF-8."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _bounded(value: str) -> str | None:
    """The value, or its hash if it is too long; None if it is empty."""
    if len(value) > MAX_ID_CHARS:
        return f"sha256-{sha256(value.encode(errors='replace')).hexdigest()}"
    return value or None


# ---- owners and tenants ----


def owner_of(headers: Mapping[str, str]) -> str | None:
    """The owner of the request's API key. One owner's data is invisible to others; ``user`` does not set an
    owner."""
    return headers.get(OWNER_HEADER) or None


def owned_id(headers: Mapping[str, str], job_id: str) -> str:
    """The engine's id of the job: prefixed by the owner of the API key, since two owners may both have a job
    "main".

    No client can name a job of another owner: with a key without a name, an id that looks prefixed gets a
    leading colon.
    """
    owner = headers.get(OWNER_HEADER)
    if owner is None:
        return job_id
    if not owner:
        return f":{job_id}" if _OWNED.match(job_id) else job_id
    return job_id if job_id.startswith(f"{owner}:") else f"{owner}:{job_id}"


def _tenant(headers: Mapping[str, str], identity: ClientIdentity) -> str | None:
    """The tenant: the owner of the API key, else the ``user`` field, else a gateway's flow, else a hash of
    the key. Neither a ``user`` nor a flow can use the name of an owner."""
    if owner := owner_of(headers):
        return owner
    named = _text(identity.tenant, "user") or _user_in(identity.metadata_user_id)
    user = named or _from_headers(headers, TENANT_HEADERS)
    if user:
        return user if headers.get(OWNER_HEADER) is None else f"user:{user}"
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = headers.get("x-api-key", "") or (key.strip() if scheme.lower() == "bearer" else "")
    return f"key-{sha256(key.encode(errors='replace')).hexdigest()[:16]}" if key else None


def _user_in(metadata_user_id: object) -> str | None:
    user_id = _text(metadata_user_id, "metadata.user_id", MAX_USER_ID_CHARS)
    return _read_user_id(user_id).user if user_id else None
