"""Sessions whose input comes in parts: they answer as one prompt of all parts would, and a waiting session
costs no one anything. Uses a real core process, and a real model where tokens matter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from continuum.cli.main import main
from continuum.policy import ContinuumPolicyFactory
from engine.core.policy import PolicyFactory, fcfs
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.errors import ContextLengthError, EngineDeadError, RequestError
from engine.executor import ExecutorFactory
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.llm import engine_config
from engine.frontend.request_output import RequestOutput
from engine.frontend.streaming_input import StreamingInput
from engine.model_executor import model_executor
from engine.records.messages import JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.testing import FakeExecutorFactory
from tests.processes.support import has_gone

MakeLLM = Callable[..., AsyncLLM]
GREEDY = SamplingParams(
    max_tokens=9, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)
DELTA = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
FOREVER = SamplingParams(max_tokens=49_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PARTS = [list(range(20, 60)), [7, 8, 9], list(range(100, 130)), [11]]
FAKE = FakeExecutorFactory(max_model_len=50_000)

pytestmark = pytest.mark.timeout(60)


@pytest_asyncio.fixture
async def make_llm(model_folder: Path) -> AsyncIterator[MakeLLM]:
    made: list[AsyncLLM] = []

    def make(
        executor_factory: ExecutorFactory = model_executor, policy: PolicyFactory = fcfs, **options: Any
    ) -> AsyncLLM:
        num_blocks = 300 if executor_factory is model_executor else 10_000
        config = engine_config(str(model_folder), **{"num_gpu_blocks_override": num_blocks} | options)
        spec = CoreSpec(config, executor_factory, policy)
        made.append(AsyncLLM(config, AsyncMPClient(CoreProcess(spec))))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
        assert has_gone(llm.core_pid, 0)


async def given(
    parts: Sequence[str | list[int]], params: SamplingParams | None = None
) -> AsyncGenerator[StreamingInput, None]:
    for part in parts:
        yield StreamingInput(part, params)


async def answers(outputs: AsyncIterator[RequestOutput]) -> list[list[int]]:
    """The tokens of the answer to each part."""
    said: list[list[int]] = []
    is_new = True
    async for output in outputs:
        said += [[]] if is_new else []
        said[-1] += output.outputs[0].token_ids
        is_new = output.finished
    assert is_new, "the last part was answered to its end"
    return said


async def of_whole_prompts(
    llm: AsyncLLM, parts: Sequence[list[int]], params: SamplingParams
) -> list[list[int]]:
    """Answers to whole prompts of all earlier tokens, without the last token of each earlier answer."""
    said: list[list[int]] = []
    prompt: list[int] = []
    for part in parts:
        prompt = [*prompt, *(said[-1][:-1] if said else []), *part]
        said += await answers(llm.generate(prompt, params, "whole"))
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": ContinuumPolicyFactory()},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 7},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
    ],
    ids=["fcfs", "continuum", "ahead", "drafts", "chunks", "no cache", "two ranks"],
)
async def test_parts_say_what_one_prompt_says(make_llm: MakeLLM, options: dict[str, Any]) -> None:
    """Answers to parts equal those to whole prompts, whatever plans and runs the steps."""
    llm = make_llm(**options)
    expected = await of_whole_prompts(llm, PARTS, DELTA)
    assert await answers(llm.generate(given(PARTS), DELTA, "session")) == expected
    assert llm.num_sessions == 0


@pytest.mark.slow
async def test_a_part_is_all_that_is_computed(make_llm: MakeLLM) -> None:
    """Earlier tokens of a session hit the cache, except those of a partial block."""
    llm = make_llm()
    cached, lengths = [], []
    async for output in llm.generate(given(PARTS), GREEDY, "session"):
        cached.append(output.num_cached_tokens)
        lengths.append(len(output.prompt_token_ids))
    assert lengths == [40, 40 + 8 + 3, 51 + 8 + 30, 89 + 8 + 1]
    assert cached == [0, 48 // 16 * 16, 59 // 16 * 16, 97 // 16 * 16]


@pytest.mark.slow
async def test_each_part_may_ask_for_something_else(make_llm: MakeLLM) -> None:
    """Text parts are tokenized as they arrive; each part may have its own grammar or stop string."""
    llm = make_llm()

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput("one two three")
        form = StructuredOutputsParams(choice=["yes", "no"])
        yield StreamingInput("four", replace(GREEDY, max_tokens=20, structured_outputs=form))
        said = llm.tokenizer.encode("five six seven", add_special_tokens=False)
        yield StreamingInput("go on", replace(GREEDY, max_tokens=50, replay_token_ids=said, stop=["six"]))
        yield StreamingInput(" and on")

    texts = [output.outputs[0].text async for output in llm.generate(parts(), GREEDY, "session")]
    assert len(texts) == 4
    assert texts[1] in ("yes", "no")
    assert texts[2] == "five "


@pytest.mark.slow
async def test_a_session_that_waits_locks_nothing(make_llm: MakeLLM) -> None:
    """Other requests get all blocks while a session waits; then it continues with the same answer."""
    llm = make_llm(num_gpu_blocks_override=24, max_model_len=320, policy=ContinuumPolicyFactory())
    expected = await of_whole_prompts(llm, PARTS[:2], DELTA)
    waits, others_are_done = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput(PARTS[0])
        waits.set()
        await others_are_done.wait()
        yield StreamingInput(PARTS[1])

    session = asyncio.create_task(answers(llm.generate(parts(), DELTA, "session")))
    await waits.wait()
    for number in range(3):
        large = [200 + number] * 240
        await answers(llm.generate(large, SamplingParams(max_tokens=9, ignore_eos=True), f"large-{number}"))
    others_are_done.set()
    assert await session == expected


async def test_an_abort_ends_a_session_that_waits(make_llm: MakeLLM) -> None:
    """An abort ends a waiting session, and a generating one with reason "abort"; it closes the input."""
    llm = make_llm(FAKE)
    closed: list[str] = []
    waits = asyncio.Event()

    async def parts(name: str) -> AsyncGenerator[StreamingInput, None]:
        try:
            yield StreamingInput([1, 2, 3], FOREVER if name == "generates" else None)
            waits.set()
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    waiting = asyncio.create_task(answers(llm.generate(parts("waits"), DELTA, "waits")))
    await waits.wait()
    assert llm.num_sessions == 1
    await llm.abort("waits")
    assert [len(said) for said in await waiting] == [9]
    generating = asyncio.create_task(_reasons(llm.generate(parts("generates"), DELTA, "generates")))
    while not (await llm.statistics()).num_running:
        pass
    await llm.abort("generates")
    assert (await generating)[-1] == "abort"
    assert (closed, llm.num_sessions) == (["waits", "generates"], 0)
    assert (await llm.statistics()).num_running == 0


async def _reasons(outputs: AsyncIterator[RequestOutput]) -> list[str | None]:
    return [output.outputs[0].finish_reason async for output in outputs]


async def test_leaving_the_loop_ends_a_session(make_llm: MakeLLM) -> None:
    """The session's request stops, and no more input is read."""
    llm = make_llm(FAKE)
    taken: list[int] = []

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for number in range(5):
            taken.append(number)
            yield StreamingInput([1, 2, number], FOREVER)

    outputs = llm.generate(parts(), DELTA, "session")
    async with aclosing(outputs):  # type: ignore[type-var]
        async for _ in outputs:
            break
    assert (taken, llm.num_sessions) == ([0], 0)
    while (await llm.statistics()).num_running:
        pass


async def test_an_error_of_the_input_is_the_callers(make_llm: MakeLLM) -> None:
    """An error of the input is raised by the loop, after the earlier output."""
    llm = make_llm(FAKE)

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput([1, 2, 3])
        raise ValueError("no more")

    outputs: list[RequestOutput] = []

    async def read() -> None:
        async for output in llm.generate(parts(), GREEDY, "session"):
            outputs.append(output)

    with pytest.raises(ValueError, match="no more"):
        await read()
    assert len(outputs[-1].outputs[0].token_ids) == 9
    assert llm.num_sessions == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=2), "n must be 1 in a session"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs does not work in a session"),
    ],
)
async def test_what_a_session_cannot_have_is_refused(
    make_llm: MakeLLM, params: SamplingParams, message: str
) -> None:
    """Unsupported parameters of a session or a part are refused, as is a prompt that grows too long."""
    llm = make_llm(FAKE)
    with pytest.raises(RequestError, match=message):
        await answers(llm.generate(given([[1]]), params, "session"))
    with pytest.raises(RequestError, match=message):
        await answers(llm.generate(given([[1]], params), DELTA, "session"))
    with pytest.raises(ContextLengthError, match="maximum context length"):
        await answers(llm.generate(given([[1] * 40_000, [2] * 20_000]), DELTA, "session"))
    assert len(await answers(llm.generate(given([[1], [2]]), DELTA, "next"))) == 2


async def test_a_core_that_dies_ends_sessions(make_llm: MakeLLM) -> None:
    """The part that is generating fails; so does the next part of a waiting session."""
    llm = make_llm(FAKE)
    dead = asyncio.Event()

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput([1, 2, 3])
        await dead.wait()
        yield StreamingInput([4])

    waiting = asyncio.create_task(answers(llm.generate(parts(), DELTA, "waits")))
    generating = asyncio.create_task(answers(llm.generate(given([[1]]), FOREVER, "generates")))
    while (await llm.statistics()).num_running != 1:
        pass
    llm.shutdown()
    dead.set()
    for session in (waiting, generating):
        with pytest.raises(EngineDeadError):
            await session


@pytest.mark.slow
async def test_a_sessions_job_is_its_callers_or_its_own(
    make_llm: MakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts are turns of one job, whose KV is kept for the next part; an unnamed job ends with its
    session. The trace replays without a difference."""
    trace = tmp_path / "trace.jsonl"
    llm = make_llm(policy=ContinuumPolicyFactory(), trace_path=str(trace))
    named = RequestContext(job=JobRef("mine"))
    await answers(llm.generate(given(PARTS), DELTA, "session", named))
    job = await llm.job("mine")
    assert job is not None
    assert job.turns == len(PARTS)
    pinned: list[int] = []

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for part in PARTS:
            yield StreamingInput(part)
            pinned.append(sum(each.pinned_blocks for each in await llm.jobs(9) if each.id != "mine"))

    await answers(llm.generate(parts(), DELTA, "another"))
    assert len(pinned) == len(PARTS)
    assert all(pinned), "what the next part continues is kept"
    assert [each.id for each in await llm.jobs(9)] == ["mine"]
    llm.shutdown()
    assert main(["trace", "replay", str(trace)]) == 0
    assert "no difference" in capsys.readouterr().out
