"""Turns that append to the previous one: the history is not rendered, sent or hashed again, and answers stay
the same. Checked on a real server and model with the openai client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseInputItemParam, ToolParam

from continuum.cli.main import main
from tests.api.server import running_server
from tests.api.test_chat import token_ids
from tests.processes.support import until

BASH: ToolParam = {
    "type": "function",
    "name": "bash",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
LOOK = 'Let me look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
ODD = 'So.\n<tool_call>\n{"arguments": {"command":"ls"},   "name": "bash"}\n</tool_call>'
"""A call in a form that no template would write."""
MOST_OUTPUT = 8
"""Tokens of a turn whose reply is not forced."""
COUNTERS = ("appended", "rendered", "known", "forgotten")
_COUNTER = re.compile(r'continuum:continued_(?:prompts|requests)_total\{.*(?:made|turn)="(\w+)".*\} (\S+)')


class Counts:
    """Counts how the prompts that continue a known turn were made, since the last check."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._before = self._read()

    def _read(self) -> dict[str, int]:
        read = dict.fromkeys(COUNTERS, 0)
        for name, value in _COUNTER.findall(self._http.get("/metrics").text):
            read[name] += int(float(value))
        return read

    def have_grown_by(self, **expected: int) -> None:
        """Waits until the counters have grown by exactly this, as the core reports after its answer."""
        wanted = {name: self._before[name] + expected.get(name, 0) for name in COUNTERS}
        until(lambda: sum(self._read().values()) >= sum(wanted.values()))
        assert self._read() == wanted
        self._before = wanted


@pytest.fixture
def counts(http: httpx.Client) -> Counts:
    return Counts(http)


class Job:
    """A conversation that the server keeps, with a local copy of its items."""

    def __init__(self, client: openai.OpenAI, http: httpx.Client, **fields: Any) -> None:
        self._client, self._http, self._fields = client, http, fields
        self.items: list[Any] = []
        self.last: Response | None = None

    def turn(self, new: list[ResponseInputItemParam], says: str | None = None, **fields: Any) -> Response:
        """Runs one turn; ``says`` forces its reply."""
        body: dict[str, Any] = {**self._fields, **fields}
        if says is None:
            body["max_output_tokens"] = MOST_OUTPUT
        forced = None if says is None else {"replay_token_ids": token_ids(self._http, says + "<|im_end|>")}
        answer: Response = self._client.responses.create(
            model="tiny",
            input=new,
            previous_response_id=None if self.last is None else self.last.id,
            temperature=0.0,
            extra_body=forced,
            **body,
        )
        self.items += [*new, *(item.to_dict() for item in answer.output)]
        self.last = answer
        return answer

    def whole(self, new: list[ResponseInputItemParam], **fields: Any) -> Response:
        """Runs the same turn with the whole history in its input."""
        answer: Response = self._client.responses.create(
            model="tiny",
            input=[*self.items, *new],
            temperature=0.0,
            max_output_tokens=MOST_OUTPUT,
            **{**self._fields, **fields},
        )
        return answer


def user(text: str) -> list[ResponseInputItemParam]:
    return [{"role": "user", "content": text}]


def result(answer: Response, text: str) -> list[ResponseInputItemParam]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": text}
        for item in answer.output
        if isinstance(item, ResponseFunctionToolCall)
    ]


def num_input_tokens(answer: Response) -> int:
    assert answer.usage is not None
    return answer.usage.input_tokens


def num_cached_tokens(answer: Response) -> int:
    assert answer.usage is not None
    return answer.usage.input_tokens_details.cached_tokens


def test_a_turn_appends_to_the_one_before(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """Prompt and answer equal those of the whole history token for token; everything before the turn is
    cached."""
    job = Job(client, http, tools=[BASH], instructions="Be brief.")
    first = job.turn(user("What is in this folder? " * 8), says=LOOK)
    counts.have_grown_by()
    second = job.turn(result(first, "a.py b.py " * 10), says="Two files.")
    counts.have_grown_by(appended=1, known=1)
    last = user("And now? " * 5)
    whole = job.whole(last, store=False)
    third = job.turn(last)
    counts.have_grown_by(appended=1, known=1)
    assert num_input_tokens(third) == num_input_tokens(whole)
    assert [item.to_dict()["type"] for item in third.output] == [
        item.to_dict()["type"] for item in whole.output
    ]
    assert third.output_text == whole.output_text
    assert num_cached_tokens(second) >= num_input_tokens(first) // 16 * 16
    assert num_cached_tokens(third) >= num_input_tokens(second) // 16 * 16


def test_a_stream_appends_as_well(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """A stream can be appended to, and can append."""
    said = {"replay_token_ids": token_ids(http, "Good day.<|im_end|>")}
    with client.responses.stream(model="tiny", input="hello", extra_body=said) as stream:
        first = stream.get_final_response()
    with client.responses.stream(
        model="tiny", input="again", previous_response_id=first.id, extra_body=said
    ) as stream:
        second = stream.get_final_response()
    counts.have_grown_by(appended=1, known=1)
    assert num_input_tokens(second) > num_input_tokens(first)


def test_the_models_own_tokens_are_kept(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """A call that the template would write differently stays in the next prompt as the model wrote it, and
    the whole turn is cached."""
    job = Job(client, http, tools=[BASH])
    first = job.turn(user("Look. " * 12), says=ODD)
    assert first.usage is not None
    following = result(first, "a.py")
    whole = job.whole(following, store=False)
    second = job.turn(following)
    counts.have_grown_by(appended=1, known=1)
    num_computed = first.usage.total_tokens - 1
    assert num_cached_tokens(second) == num_computed // 16 * 16
    assert num_cached_tokens(whole) < num_cached_tokens(second)


@pytest.mark.parametrize(
    "changes",
    [
        {"instructions": "Be long."},
        {"tools": [{**BASH, "description": "Runs a command."}]},
        {"reasoning": {"effort": "none"}},
    ],
    ids=["instructions", "tools", "reasoning"],
)
def test_another_prompt_is_rendered(
    client: openai.OpenAI, http: httpx.Client, counts: Counts, changes: dict[str, Any]
) -> None:
    """A change at the beginning of a prompt reaches the model as it does without a previous turn."""
    job = Job(client, http, tools=[BASH], instructions="Be brief.")
    job.turn(user("hello"), says="Good day.")
    whole = job.whole(user("again"), store=False, **changes)
    second = job.turn(user("again"), **changes)
    counts.have_grown_by(rendered=1)
    assert num_input_tokens(second) == num_input_tokens(whole)
    assert second.output_text == whole.output_text


def test_a_reply_that_was_cut_is_rendered(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """A reply cut off by its length is rendered in full: only the template knows how to end it."""
    job = Job(client, http)
    first = job.turn(user("hello"))
    assert first.status == "incomplete"
    whole = job.whole(user("again"), store=False)
    second = job.turn(user("again"))
    counts.have_grown_by()
    assert num_input_tokens(second) == num_input_tokens(whole)


def test_a_turn_is_continued_twice(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """The first continuation takes the tokens that the core keeps; for a second one the core requests all of
    them."""
    job = Job(client, http)
    first = job.turn(user("hello " * 20), says="Good day.")
    one = job.turn(user("and one"))
    job.last, job.items = first, job.items[:2]
    whole = job.whole(user("and one"), store=False)
    counts.have_grown_by(appended=1, known=1)
    other = job.turn(user("and one"))
    counts.have_grown_by(appended=1, forgotten=1)
    assert one.output_text == other.output_text == whole.output_text
    assert num_input_tokens(one) == num_input_tokens(other)


def test_a_deleted_turn_ends_its_chain(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """A continued chain must be stored completely, even where only its last turn would be read."""
    job = Job(client, http)
    first = job.turn(user("hello"), says="Good day.")
    second = job.turn(user("again"), says="Good day, again.")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"{first.id}.*, which .* continues"):
        job.turn(user("and again"))
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match=second.id):
        job.turn(user("and again"))
    counts.have_grown_by(appended=1, known=1)


def test_a_result_names_a_call_of_any_turn(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """A result may answer a call of any earlier turn, but not a call that was never made."""
    job = Job(client, http, tools=[BASH])
    first = job.turn(user("look"), says=LOOK)
    late = result(first, "a.py")
    job.turn(user("wait"), says="I wait.")
    job.turn(user("wait more"), says="I still wait.")
    whole = job.whole(late, store=False)
    thanked = job.turn(late)
    counts.have_grown_by(appended=2, known=2, rendered=1)
    assert (num_input_tokens(thanked), thanked.output_text) == (num_input_tokens(whole), whole.output_text)
    with pytest.raises(openai.BadRequestError, match="No tool call found"):
        job.turn([{"type": "function_call_output", "call_id": "none", "output": "x"}])


def test_a_conversation_appends_too(client: openai.OpenAI, http: httpx.Client, counts: Counts) -> None:
    """A turn that names its conversation continues its newest response."""
    named = http.post("/v1/conversations", json={}).json()["id"]
    said = {"replay_token_ids": token_ids(http, "Good day.<|im_end|>")}
    for _ in range(3):
        client.responses.create(model="tiny", input="hello", conversation=named, extra_body=said)
    counts.have_grown_by(appended=2, known=2)


def test_a_prompt_that_is_too_long_is_named(client: openai.OpenAI, http: httpx.Client) -> None:
    """The error states the number of tokens; with ``truncation: auto`` the client gets an answer."""
    job = Job(client, http)
    job.turn(user("hello " * 100), says="Good day.")
    longer = user("again " * 250)
    with pytest.raises(openai.BadRequestError, match=r"1024 tokens, but the prompt is too long: \d+ tokens"):
        job.turn(longer)
    assert job.turn(longer, truncation="auto").status in ("completed", "incomplete")


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[tuple[openai.OpenAI, httpx.Client]]:
    """A server whose core keeps the tokens of at most two turns."""
    with (
        running_server(model, "--num-gpu-blocks-override", "40", "--max-model-len", "512") as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client, http


@pytest.mark.slow
def test_a_core_that_has_forgotten_asks(small: tuple[openai.OpenAI, httpx.Client]) -> None:
    """If the core has evicted a turn's tokens, the whole prompt is sent again and the answer is the same."""
    client, http = small
    counts = Counts(http)
    jobs = [Job(client, http) for _ in range(5)]
    for number, job in enumerate(jobs):
        job.turn(user(f"hello {number} " * 40), says="Good day.")
    counts.have_grown_by()
    whole = jobs[0].whole(user("again"), store=False)
    again = jobs[0].turn(user("again"))
    counts.have_grown_by(appended=1, forgotten=1)
    assert again.output_text == whole.output_text
    assert num_input_tokens(again) == num_input_tokens(whole)


@pytest.mark.slow
def test_a_trace_of_them_is_decided_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace holds complete prompts, also where only the appended part was sent."""
    trace = tmp_path / "trace.jsonl"
    with (
        running_server(model, "--num-gpu-blocks-override", "80", "--trace", str(trace)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        counts = Counts(http)
        jobs = [Job(client, http, tools=[BASH]) for _ in range(3)]
        for number, job in enumerate(jobs):
            first = job.turn(user(f"look {number} " * 9), says=LOOK)
            job.turn(result(first, "a.py " * 20), says="Two.")
        for job in jobs:
            job.turn(user("and now"))
        counts.have_grown_by(appended=6, known=6)
        assert server.interrupt() == 0
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
