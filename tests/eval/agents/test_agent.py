"""Promises of the agent: it runs the model's calls, returns the results, and distinguishes every ending."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from eval.agents.agent import Agent, Ending, Event, ReplyCame, ResultCame, TextCame
from eval.agents.http_model import HttpModel
from eval.agents.model import ChatModel, Sampling
from eval.agents.openai_model import OpenAIModel, open_client
from eval.agents.sandbox import folder_of
from eval.agents.tools import Toolbox
from eval.errors import ServerGoneError
from eval.load.client import ServerClient
from tests.clients.wiretap import check_one_kept_job
from tests.eval.agents.scripts import FILES

LONG_S = 0.3


@pytest.fixture
def root() -> Iterator[Path]:
    with folder_of(FILES) as folder:
        yield folder


@pytest.fixture(params=["http", "openai"])
async def model(request: pytest.FixtureRequest, agent_server: str) -> AsyncIterator[ChatModel]:
    """The same model over both transports."""
    if request.param == "http":
        async with ServerClient(agent_server, model="tiny") as client:
            yield HttpModel(client, Sampling())
    else:
        async with open_client(agent_server) as library:
            yield OpenAIModel(library, "tiny", Sampling())


async def test_calls_are_carried_out_and_their_results_lead_to_an_answer(
    model: ChatModel, root: Path
) -> None:
    """Each turn has its text, calls and results; the server sees one job and keeps its KV."""
    events: list[Event] = []
    agent = Agent(model=model, tools=Toolbox(root), max_turns=6, watch=events.append)
    run = await agent.ask(f"How many lines are in notes? Asked over {type(model).__name__}.")
    assert (run.ending, run.answer, run.error) == (Ending.ANSWERED, "There are 4 lines.", None)
    assert [[(r.call.name, r.result) for r in turn.results] for turn in run.turns] == [
        [("list_files", "a.txt\nb.txt")],
        [("count_lines", "3"), ("count_lines", "1")],
        [("python", "4")],
        [],
    ]
    assert run.turns[0].reply.text.strip() == "I look around."
    assert all(turn.gap_s > 0 for turn in run.turns[:-1])
    receipts = [turn.reply.receipt for turn in run.turns]
    check_one_kept_job([{name: getattr(r, name) for name in r.__struct_fields__} for r in receipts if r])
    assert "".join(event.text for event in events if isinstance(event, TextCame)) == "".join(
        turn.reply.text for turn in run.turns
    )
    assert [type(event).__name__ for event in events if not isinstance(event, TextCame)] == [
        *(ReplyCame.__name__, ResultCame.__name__),
        *(ReplyCame.__name__, ResultCame.__name__, ResultCame.__name__),
        *(ReplyCame.__name__, ResultCame.__name__),
        ReplyCame.__name__,
    ]


async def test_a_call_that_leaves_the_folder_is_refused_and_the_model_is_told(
    model: ChatModel, root: Path
) -> None:
    """The model gets the refusal, or an unknown tool, as a text result; the agent goes on."""
    (root.parent / "secret.txt").write_text("hush")
    run = await Agent(model=model, tools=Toolbox(root), max_turns=3).ask("Read the secret.")
    assert [result.result for result in run.turns[0].results] == [
        "error: ../secret.txt is outside the folder",
        "error: there is no tool delete_all",
    ]
    assert run.answer == "I was not allowed to."


async def test_an_agent_stops_at_its_turn_limit(model: ChatModel, root: Path) -> None:
    """The calls of the last reply are not run, and the conversation is restored."""
    agent = Agent(model=model, tools=Toolbox(root), max_turns=3)
    run = await agent.ask("Never stop.")
    assert (run.ending, run.answer, len(run.turns)) == (Ending.OVER_LIMIT, "", 3)
    assert [len(turn.results) for turn in run.turns] == [1, 1, 0]
    assert agent.messages == []


async def test_a_request_that_is_refused_is_told(model: ChatModel, root: Path) -> None:
    """A refused request, as when the context is full, keeps the earlier conversation."""
    agent = Agent(model=model, tools=Toolbox(root), max_turns=6)
    await agent.ask("How many lines are there in notes?")
    num_messages = len(agent.messages)
    run = await agent.ask("word " * 20_000)
    assert run.ending is Ending.FAILED
    assert run.error is not None
    assert "maximum context length" in run.error
    assert len(agent.messages) == num_messages


async def test_calls_of_one_reply_run_at_the_same_time(model: ChatModel, root: Path) -> None:
    """Two concurrent calls of stated durations take as long as the longer one."""
    agent = Agent(
        model=model,
        tools=Toolbox(root),
        max_turns=6,
        delay_of=lambda call: LONG_S if call.name == "count_lines" else 0.0,
    )
    started = time.perf_counter()
    run = await agent.ask("How many lines have the notes?")
    assert run.answer == "There are 4 lines."
    both = run.turns[1]
    assert all(result.seconds >= LONG_S for result in both.results)
    assert LONG_S <= both.gap_s < 2 * LONG_S
    assert run.seconds <= time.perf_counter() - started


async def test_a_job_may_be_named(model: ChatModel, root: Path) -> None:
    """The server then assigns the turns to the agent's job id."""
    job_id = f"named-{type(model).__name__}"
    agent = Agent(model=model, tools=Toolbox(root), max_turns=6, job_id=job_id)
    run = await agent.ask("Write the port down.")
    assert {turn.reply.receipt.job_id for turn in run.turns if turn.reply.receipt} == {job_id}
    assert (root / "port.txt").read_text() == "8123"


async def test_a_server_that_is_not_there_is_an_error(root: Path) -> None:
    """An unreachable server gives one sentence, over either transport."""
    nowhere = "http://127.0.0.1:9"
    async with ServerClient(nowhere, model="tiny") as client, open_client(nowhere) as library:
        for model in (HttpModel(client, Sampling()), OpenAIModel(library, "tiny", Sampling())):
            with pytest.raises(ServerGoneError, match=r"127\.0\.0\.1:9"):
                await Agent(model=model, tools=Toolbox(root), max_turns=1).ask("Anything")
