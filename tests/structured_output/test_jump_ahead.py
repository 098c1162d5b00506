"""Jump ahead: tokens that a grammar forces are drafted, which gives the same tokens in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.drafts.forced import LAST, USUAL, behind_forced
from engine.core.drafts.proposal import NOTHING, Proposal
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from eval.agent_model import folder as agent_model
from tests.api.server import running_server

GRAMMAR_ONLY = {"method": "grammar", "weigh_costs": False}
CALL = {
    "type": "object",
    "properties": {
        "command": {"const": "run_all_of_the_tests_that_there_are"},
        "file": {"enum": ["a_rather_long_name_of_a_file", "a_rather_long_name_of_a_folder"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["command", "file", "count"],
    "additionalProperties": False,
}
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.1, "seed": 5, "n": 2}]
NAMES = st.text("abcdefgh_", min_size=1, max_size=12)
LEAVES = st.one_of(
    st.builds(lambda text: {"const": text}, NAMES),
    st.builds(lambda texts: {"enum": texts}, st.lists(NAMES, min_size=1, max_size=3, unique=True)),
    st.just({"type": "boolean"}),
    st.just({"type": "integer", "minimum": 0, "maximum": 9}),
)


def an_object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.builds(an_object, st.dictionaries(NAMES, inner, min_size=1, max_size=3)),
    max_leaves=6,
)


@pytest.fixture(scope="module", params=["grammar", "suffix"])
def drafting(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[LLM]:
    method = {"method": request.param, "weigh_costs": False}
    options: dict[str, Any] = {"multiprocess": False, "num_gpu_blocks_override": 600}
    with LLM(str(model_folder), speculative_config=method, **options) as llm:
        yield llm


def said(llm: LLM, schema: dict[str, Any], **params: Any) -> list[list[int]]:
    return said_under(llm, StructuredOutputsParams(json=schema), **params)


def said_under(llm: LLM, constraint: StructuredOutputsParams, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=120, structured_outputs=constraint, **{"temperature": 0, **params})
    (output,) = llm.generate(["Call a tool"], sampling, use_tqdm=False)
    return [list(answer.token_ids) for answer in output.outputs]


@settings(max_examples=25, deadline=None)
@given(
    SCHEMAS, st.sampled_from([{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.1, "seed": 5, "n": 2}])
)
def test_tokens_are_those_without_drafts(
    llm: LLM, drafting: LLM, schema: dict[str, Any], params: dict[str, Any]
) -> None:
    """For any schema, greedy or seeded, with one answer or two, drafts change no token."""
    assert said(drafting, schema, **params) == said(llm, schema, **params)


@pytest.mark.parametrize("params", WAYS, ids=str)
def test_structural_tags_are_followed_alike_with_drafts(
    llm: LLM, drafting: LLM, params: dict[str, Any]
) -> None:
    """Free text up to a tag, special tokens in the tags and forced text inside are the same with drafts."""
    call = {"type": "json_schema", "json_schema": CALL}
    tag = {"type": "tag", "begin": "<tool_call>\n", "content": call, "end": "\n</tool_call>"}
    for kind in (
        {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag], "at_least_one": True},
        {"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}, tag]},
    ):
        constraint = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": kind})
        assert said_under(drafting, constraint, **params) == said_under(llm, constraint, **params)


def forced_call(model_folder: Path, *flags: str) -> dict[str, Any]:
    """A forced call's answer from a new server."""
    body = {
        "messages": [{"role": "user", "content": "call it"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "call", "schema": CALL}},
        "temperature": 0,
        "max_tokens": 200,
        "job_id": "job",
    }
    with running_server(model_folder, "--num-gpu-blocks-override", "300", *flags) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.fixture(scope="module")
def without(model_folder: Path) -> dict[str, Any]:
    """The answer of a server without drafts."""
    told = forced_call(model_folder)
    assert told["usage"]["receipt"].get("accepted_tokens", 0) == 0
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ahead"),
    [
        ("grammar", ()),
        ("grammar", ("--async-scheduling",)),
        ("suffix", ("--async-scheduling",)),
        ("ngram", ()),
    ],
)
def test_a_forced_call_takes_fewer_steps(
    model_folder: Path, without: dict[str, Any], method: str, ahead: tuple[str, ...]
) -> None:
    """Over HTTP, the receipt shows fewer steps than tokens."""
    config = f'{{"method": "{method}", "weigh_costs": false}}'
    with_drafts = forced_call(model_folder, *ahead, "--speculative-config", config)
    assert with_drafts["choices"][0]["message"] == without["choices"][0]["message"]
    usage = with_drafts["usage"]
    assert usage["receipt"]["output_steps"] < 0.7 * usage["completion_tokens"]


def test_forced_tokens_come_before_a_drafters() -> None:
    """A drafter's tokens are kept if they agree with the forced ones; their chances are then conditional."""
    assert behind_forced([], NOTHING) == NOTHING
    alone = behind_forced([1, 2], NOTHING)
    assert alone.token_ids == [1, 2]
    assert list(alone.chances) == pytest.approx([USUAL, USUAL**2 * LAST])
    agreed = behind_forced([1, 2], Proposal([1, 7, 8], [0.5, 0.4, 0.2]))
    assert agreed.token_ids == [1, 7, 8]
    assert list(agreed.chances) == pytest.approx([USUAL, USUAL * 0.8, USUAL * 0.4])
    assert behind_forced([1, 2, 3], Proposal([1, 9, 8], [0.5, 0.4, 0.2])).token_ids == [1, 2, 3]
    assert behind_forced([1], Proposal([4, 5], [0.9, 0.8])) == Proposal([4, 5], [0.9, 0.8])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string"} for field in fields},
                "required": list(fields),
                "additionalProperties": False,
            },
        },
    }
    for name, fields in (("read_file", ["path"]), ("write_file", ["path", "content"]))
]


@pytest.mark.slow
def test_demanded_calls_in_the_models_own_syntax_are_the_same() -> None:
    """The forced frames of calls begin and end with special tokens, and drafts change no call."""
    answers: list[list[dict[str, Any]]] = []
    for flags in ((), ("--speculative-config", '{"method": "grammar", "weigh_costs": false}')):
        with (
            running_server(agent_model(), "--num-gpu-blocks-override", "400", *flags) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            found = [
                http.post("/v1/chat/completions", json=demand(text, choice))
                for text in ("Write hello into a.txt", "Read main.py")
                for choice in ("required", {"type": "function", "function": {"name": "read_file"}})
            ]
        assert [answer.status_code for answer in found] == [200] * 4, [answer.text for answer in found]
        answers.append([answer.json() for answer in found])
    calls = [[functions(answer) for answer in each] for each in answers]
    assert calls[0] == calls[1]
    assert all(answer["usage"]["receipt"]["accepted_tokens"] > 0 for answer in answers[1])


def demand(text: str, choice: str | dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    limits = {"temperature": 0, "max_tokens": 60, "job_id": f"{text}, {choice}"}
    return {"messages": messages, "tools": TOOLS, "tool_choice": choice, **limits}


def functions(answer: dict[str, Any]) -> list[Any]:
    return [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or []]
