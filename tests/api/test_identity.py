"""Promises to clients that send no ``job_id``: other fields and headers name their job, in a fixed order."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from engine.api.http.auth import OWNER_HEADER
from engine.api.service.identity import MAX_ID_CHARS, ClientIdentity, identify
from engine.errors import RequestError
from engine.records.messages import JobRef

SESSION = "0f5ae2b1-3a52-4a1c-9d0e-6d1f8f4f2a10"
OLD_USER_ID = f"user_1c2d_account__session_{SESSION}"
NEW_USER_ID = json.dumps({"device_id": "d" * 64, "account_uuid": "acc-1", "session_id": SESSION})

Said = tuple[dict[str, str], ClientIdentity]

ORDER: list[tuple[str, Said]] = [
    ("job_id", ({}, ClientIdentity(job_id="1"))),
    ("vllm_xargs.job_id", ({}, ClientIdentity(xargs={"job_id": "2"}))),
    ("session_id", ({}, ClientIdentity(session_id="3"))),
    ("X-Session-ID", ({"X-Session-ID": "4"}, ClientIdentity())),
    ("vllm_xargs.session_id", ({}, ClientIdentity(xargs={"session_id": "5"}))),
    ("X-Claude-Code-Session-Id", ({"X-Claude-Code-Session-Id": "6"}, ClientIdentity())),
    ("metadata.user_id", ({}, ClientIdentity(metadata_user_id="user_x_session_7"))),
    ("thread-id", ({"thread-id": "8"}, ClientIdentity())),
    ("session-id", ({"session-id": "9"}, ClientIdentity())),
    ("session_id header", ({"session_id": "10"}, ClientIdentity())),
    ("x-opencode-session", ({"x-opencode-session": "11"}, ClientIdentity())),
    ("X-Session-Affinity", ({"X-Session-Affinity": "12"}, ClientIdentity())),
    ("X-Correlation-ID", ({"X-Correlation-ID": "13"}, ClientIdentity())),
    ("X-Dynamo-Session-ID", ({"X-Dynamo-Session-ID": "14"}, ClientIdentity())),
    ("X-SMG-Routing-Key", ({"X-SMG-Routing-Key": "15"}, ClientIdentity())),
    ("x-aibrix-session-key", ({"x-aibrix-session-key": "16"}, ClientIdentity())),
    ("prompt_cache_key", ({}, ClientIdentity(prompt_cache_key="17"))),
    ("conversation", ({}, ClientIdentity(conversation="18"))),
    ("previous response", ({}, ClientIdentity(previous_job_id="19"))),
]


def job(headers: dict[str, str], said: ClientIdentity | None = None) -> JobRef:
    return identify(Headers(headers), said or ClientIdentity())


def both(first: Said, second: Said) -> JobRef:
    """The job of a request that names one in both ways."""
    xargs: dict[str, object] = {}
    said = ClientIdentity()
    for _, each in (second, first):
        fields = {name: getattr(each, name) for name in ClientIdentity.__slots__}
        xargs |= fields.pop("xargs") or {}
        said = replace(said, **{name: value for name, value in fields.items() if value is not None})
    return job({**second[0], **first[0]}, replace(said, xargs=xargs or None))


@pytest.mark.parametrize("place", range(len(ORDER)), ids=[name for name, _ in ORDER])
def test_each_way_to_name_a_job_counts_before_those_after_it(place: int) -> None:
    """Each row of the table names a job and takes precedence over every later row."""
    _, said = ORDER[place]
    assert job(*said).job_id == str(place + 1)
    for _, later in ORDER[place + 1 :]:
        assert both(said, later).job_id == str(place + 1)


CLAUDE = {"x-claude-code-session-id": "s"}


@pytest.mark.parametrize(
    ("headers", "said", "job_id", "parent_id"),
    [
        (CLAUDE, {}, "s", None),
        ({**CLAUDE, "x-claude-code-agent-id": "a"}, {}, "s/a", "s"),
        (
            {**CLAUDE, "x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
            {},
            "s/b",
            "s/a",
        ),
        ({"x-claude-code-agent-id": "a"}, {"metadata_user_id": "user_x_session_s"}, "s/a", None),
        ({"session-id": "run", "thread-id": "run"}, {}, "run", None),
        (
            {"session-id": "run", "thread-id": "child", "x-codex-parent-thread-id": "run"},
            {},
            "child",
            "run",
        ),
        ({"x-session-id": "ses_b", "x-parent-session-id": "ses_a"}, {}, "ses_b", "ses_a"),
        ({"x-dynamo-session-id": "b", "x-dynamo-parent-session-id": "a"}, {}, "b", "a"),
        ({"x-parent-session-id": "other"}, {"job_id": "b", "parent_job_id": "a"}, "b", "a"),
        ({}, {"xargs": {"job_id": "b", "parent_job_id": "a"}}, "b", "a"),
        ({}, {"job_id": "a", "parent_job_id": "a"}, "a", None),
        ({"x-parent-session-id": "a"}, {}, None, None),
    ],
)
def test_a_sub_agent_is_a_job_with_a_parent(
    headers: dict[str, str], said: dict[str, Any], job_id: str | None, parent_id: str | None
) -> None:
    found = job(headers, ClientIdentity(**said))
    assert (found.job_id, found.parent_id) == (job_id, parent_id)


def test_a_parent_is_of_the_same_owner() -> None:
    """Whatever a client calls it, the name begins with its own."""
    found = job({OWNER_HEADER: "bob"}, ClientIdentity(job_id="b", parent_job_id="alice:a"))
    assert found.parent_id is not None
    assert found.parent_id.startswith("bob:")


def test_whoever_says_nothing_gets_a_job_that_is_inferred() -> None:
    """A request without any name gets an inferred job: an empty id, not no job."""
    assert job({}) == JobRef(None)
    assert job({"X-Session-ID": "  "}, ClientIdentity(session_id="", prompt_cache_key="")) == JobRef(None)


@pytest.mark.parametrize("user_id", [OLD_USER_ID, NEW_USER_ID])
def test_claude_codes_session_is_in_the_user_id(user_id: str) -> None:
    """The session is read from both shapes of ``user_id``; the rest of it names the user."""
    found = job({}, ClientIdentity(metadata_user_id=user_id))
    assert found.job_id == SESSION
    assert found.tenant in ("user_1c2d_account_", "acc-1")


@pytest.mark.parametrize(
    "user_id", ["somebody", "{not json", '{"session_id": 5}', '{"session_id": "\\ud800"}']
)
def test_a_user_id_without_a_session_names_no_job(user_id: str) -> None:
    """A user id without a session names a user but no job."""
    assert job({}, ClientIdentity(metadata_user_id=user_id)).job_id is None


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (ClientIdentity(job_id=""), "job_id"),
        (ClientIdentity(job_id="x" * (MAX_ID_CHARS + 1)), "job_id"),
        (ClientIdentity(job_id=True), "job_id"),
        (ClientIdentity(job_id="\ud800"), "job_id"),
        (ClientIdentity(xargs=[]), "vllm_xargs"),
        (ClientIdentity(xargs={"job_id": ["a"]}), "vllm_xargs"),
        (ClientIdentity(xargs={"is_last_step": "no"}), "vllm_xargs"),
        (ClientIdentity(session_id={}), "session_id"),
        (ClientIdentity(metadata_user_id=["x"]), "metadata"),
        (ClientIdentity(prompt_cache_key=1.5), "prompt_cache_key"),
        (ClientIdentity(conversation=[]), "conversation"),
        (ClientIdentity(conversation={"id": []}), "conversation"),
        (ClientIdentity(is_last_step="yes"), "is_last_step"),
        (ClientIdentity(tenant=["x"]), "user"),
        # Has no effect, since another field counts first, but is still invalid.
        (ClientIdentity(job_id="a", prompt_cache_key=[]), "prompt_cache_key"),
    ],
)
def test_a_body_that_cannot_name_a_job_is_told_which_field_is_wrong(said: ClientIdentity, field: str) -> None:
    """The error is one sentence that names the field."""
    with pytest.raises(RequestError) as refused:
        job({}, said)
    assert refused.value.field == field
    assert field in str(refused.value)


@given(st.dictionaries(st.sampled_from(["X-Session-ID", "x-is-last-step", "Authorization"]), st.text()))
def test_no_header_is_an_error(headers: dict[str, str]) -> None:
    """Headers added by a proxy never fail a request, however odd or long; ids have a bounded length."""
    raw = {name: value.encode("latin-1", "replace").decode("latin-1") * 50 for name, value in headers.items()}
    found = identify(raw | {name.lower(): value for name, value in raw.items()}, ClientIdentity())
    assert found.job_id is None or 0 < len(found.job_id) <= MAX_ID_CHARS


def test_a_long_header_is_known_by_its_hash() -> None:
    """A long header is hashed: equal ones name the same job, others another."""
    first, second = "x" * 1000, "x" * 999
    assert job({"X-Session-ID": first}) == job({"X-Session-ID": first})
    assert job({"X-Session-ID": first}) != job({"X-Session-ID": second})


def test_ids_may_be_numbers_and_any_script() -> None:
    """A number is read as its digits, the bytes of a header as UTF-8."""
    assert job({}, ClientIdentity(xargs={"job_id": 7})).job_id == "7"
    assert job({"X-Session-ID": "задача".encode().decode("latin-1")}).job_id == "задача"


def test_the_last_step_may_be_said_in_a_header() -> None:
    """Clients that cannot add a field may send a header; the body's value takes precedence."""
    assert job({"X-Is-Last-Step": "true"}).is_last_step
    assert not job({"X-Is-Last-Step": "false"}).is_last_step
    assert not job({"X-Is-Last-Step": "1"}, ClientIdentity(is_last_step=False)).is_last_step
    assert job({}, ClientIdentity(xargs={"is_last_step": 1})).is_last_step


def test_the_tenant_is_the_user_else_the_owner_of_the_key() -> None:
    """The tenant is the ``user``, else derived from the key; keys differ from each other and are never
    shown."""
    bearer = job({"Authorization": "Bearer secret"})
    assert bearer.tenant is not None
    assert "secret" not in bearer.tenant
    assert bearer == job({"X-Api-Key": "secret"})
    assert bearer != job({"X-Api-Key": "other"})
    assert job({"X-Api-Key": "secret"}, ClientIdentity(tenant="ann")).tenant == "ann"
    assert job({}).tenant is None


def test_operators_name_headers_of_their_own() -> None:
    """They count before all other headers, and after what the body says."""
    headers = Headers({"X-Our-Run": "a", "X-Session-ID": "b"})
    assert identify(headers, ClientIdentity()).job_id == "b"
    assert identify(headers, ClientIdentity(), ("x-our-run",)).job_id == "a"
    assert identify(headers, ClientIdentity(session_id="c"), ("x-our-run",)).job_id == "c"


def test_a_gateways_flow_is_a_tenant_and_its_final_turn_the_last() -> None:
    """A flow is made of many jobs, and gives way to the body's user."""
    flow = {"X-LLM-D-Inference-Fairness-ID": "team-a", "Authorization": "Bearer k"}
    assert (job(flow).tenant, job(flow).job_id) == ("team-a", None)
    assert job({"X-Gateway-Inference-Fairness-ID": "team-b"}).tenant == "team-b"
    assert job(flow, ClientIdentity(tenant="ann")).tenant == "ann"
    assert job({"X-Dynamo-Session-ID": "s", "X-Dynamo-Session-Final": "true"}).is_last_step
    assert not job({"X-Dynamo-Session-ID": "s", "X-Dynamo-Session-Final": "false"}).is_last_step
    assert job({"X-Session-Token": "cG9kLTE="}).job_id is None, "the name of a pod"
