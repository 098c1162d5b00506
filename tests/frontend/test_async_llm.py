"""Many streams over one core process: each ends as it should, whatever happens to callers and the core."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.core.policy import PolicyFactory, fcfs
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.errors import EngineDeadError, EngineGenerateError, RequestError
from engine.executor import ExecutorFactory
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.llm import engine_config
from engine.frontend.request_output import RequestOutput
from engine.frontend.stats import IterationStats
from engine.records.messages import JobRef, RequestContext, ToolCall
from engine.records.reported_stats import SchedulerStats
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.testing import FakeExecutorFactory, fake_token
from tests.processes.support import GONE_WITHIN_S, SignalPolicyFactory, freeze, has_gone

ENDLESS = FakeExecutorFactory(max_model_len=50_000)
"""A stand-in whose requests run longer than any test waits for their end."""

MakeLLM = Callable[..., AsyncLLM]
FOREVER = SamplingParams(max_tokens=49_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)

pytestmark = pytest.mark.timeout(20)


@pytest_asyncio.fixture
async def make_llm(model_folder: Path) -> AsyncIterator[MakeLLM]:
    made: list[AsyncLLM] = []

    def make(
        executor_factory: ExecutorFactory | None = None, policy_factory: PolicyFactory = fcfs
    ) -> AsyncLLM:
        config = engine_config(str(model_folder), num_gpu_blocks_override=10_000)
        spec = CoreSpec(config, executor_factory or ENDLESS, policy_factory)
        made.append(AsyncLLM(config, AsyncMPClient(CoreProcess(spec))))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
        assert has_gone(llm.core_pid, 0)


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    final = None
    async for output in outputs:
        final = output
    assert final is not None
    assert final.finished
    return final


async def until_running(llm: AsyncLLM, count: int) -> None:
    """Waits until the core has admitted this many requests; they are long enough to be seen."""
    while (await llm.statistics()).num_running < count:
        pass


async def all_blocks_free(llm: AsyncLLM) -> bool:
    statistics = await llm.statistics()
    return statistics.num_free_blocks == statistics.num_blocks and not statistics.num_running


async def test_streams_do_not_mix(make_llm: MakeLLM) -> None:
    """Each of twenty concurrent streams gets all of its own tokens, in order, and ends once."""
    llm = make_llm()

    async def stream(name: str) -> list[int]:
        tokens = []
        params = SamplingParams(max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("Hello", params, name):
            tokens += output.outputs[0].token_ids
        return tokens

    names = [f"r{number}" for number in range(20)]
    streams = await asyncio.gather(*map(stream, names))
    for name, tokens in zip(names, streams, strict=True):
        assert tokens == [fake_token(name, position, 512) for position in range(30)]
    assert await all_blocks_free(llm)


async def test_a_consumer_that_lags_loses_nothing(make_llm: MakeLLM) -> None:
    """A lagging consumer gets all tokens: outputs that it missed are merged into one."""
    llm = make_llm()
    params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    outputs = []
    async for output in llm.generate("Hello", params, "slow"):
        outputs.append(output)
        if len(outputs) == 1:
            await last(llm.generate("Hello", SamplingParams(max_tokens=300, ignore_eos=True), "fast"))
    assert len(outputs) < 200
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert tokens == [fake_token("slow", position, 512) for position in range(200)]


async def test_n_answers_arrive_as_one_stream(make_llm: MakeLLM) -> None:
    """All n answers end under their own index, and the stream ends with the last of them."""
    final = await last(
        make_llm().generate(
            "Hello",
            SamplingParams(n=4, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY),
            "a",
        )
    )
    assert [answer.index for answer in final.outputs] == [0, 1, 2, 3]
    assert all(len(answer.token_ids) == 6 for answer in final.outputs)


async def test_leaving_a_stream_aborts_its_request(make_llm: MakeLLM) -> None:
    """Breaking out of a stream, or being cancelled, frees the request's blocks in the core."""
    llm = make_llm()
    async with aclosing(as_generator(llm.generate("Hello", FOREVER, "left"))) as stream:
        async for _ in stream:
            break
    assert await all_blocks_free(llm)

    task = asyncio.create_task(last(llm.generate("Hello", FOREVER, "cancelled")))
    await until_running(llm, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await all_blocks_free(llm)


def as_generator(outputs: AsyncIterator[RequestOutput]) -> Any:
    return outputs


async def test_an_abort_by_name_ends_its_stream(make_llm: MakeLLM) -> None:
    """An abort gives the reader a last output with reason "abort", for one answer or n."""
    llm = make_llm()
    for n in (1, 3):
        params = SamplingParams(
            n=n, max_tokens=49_000, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        task = asyncio.create_task(last(llm.generate("Hello", params, "a")))
        await until_running(llm, n)
        await llm.abort("a")
        assert [answer.finish_reason for answer in (await task).outputs] == ["abort"] * n
        assert await all_blocks_free(llm)
    await llm.abort("never-existed")


async def test_a_wrong_request_costs_the_others_nothing(make_llm: MakeLLM) -> None:
    """A wrong request raises for its caller alone."""
    llm = make_llm()
    other = asyncio.create_task(
        last(llm.generate("Hello", SamplingParams(max_tokens=50, ignore_eos=True), "good"))
    )
    with pytest.raises(RequestError):
        await last(llm.generate([], SHORT, "bad"))
    assert len((await other).outputs[0].token_ids) == 50


async def test_a_request_that_fails_inside_raises_for_its_caller(make_llm: MakeLLM) -> None:
    """The caller gets an EngineGenerateError with the core's reason; the engine lives on."""
    llm = make_llm(policy_factory=SignalPolicyFactory())
    with pytest.raises(EngineGenerateError, match="a bad job"):
        await last(llm.generate("Hello", FOREVER, "bad", RequestContext(job=JobRef("bad"))))
    assert len((await last(llm.generate("Hello", SHORT, "good"))).outputs[0].token_ids) == 5
    assert await all_blocks_free(llm)


async def test_kill_9_of_the_core_ends_every_stream(make_llm: MakeLLM) -> None:
    """Within two seconds every open stream and call raises EngineDeadError; later ones raise at once."""
    llm = make_llm()
    streams = [asyncio.create_task(last(llm.generate("Hello", FOREVER, f"r{number}"))) for number in range(8)]
    await until_running(llm, 8)
    freeze(llm.core_pid)  # so that the call below is still open when the core dies
    call = asyncio.create_task(llm.statistics())
    killed = time.monotonic()
    os.kill(llm.core_pid, signal.SIGKILL)
    results = await asyncio.gather(*streams, call, return_exceptions=True)
    await llm.dead.wait()
    assert time.monotonic() - killed < GONE_WITHIN_S
    assert [type(result) for result in results] == [EngineDeadError] * 9
    assert llm.errored
    for attempt in (llm.check_health(), llm.statistics(), last(llm.generate("Hello", SHORT, "late"))):
        with pytest.raises(EngineDeadError):
            await attempt


async def test_a_core_that_dies_while_nothing_runs_is_noticed(make_llm: MakeLLM) -> None:
    """``dead`` is set although no request was ever sent."""
    llm = make_llm()
    dead = asyncio.create_task(llm.dead.wait())
    os.kill(llm.core_pid, signal.SIGKILL)
    await asyncio.wait_for(dead, GONE_WITHIN_S)


async def test_shutdown_ends_open_streams(make_llm: MakeLLM) -> None:
    """Open streams raise EngineDeadError on shutdown; a second shutdown does nothing."""
    llm = make_llm()
    stream = asyncio.create_task(last(llm.generate("Hello", FOREVER, "a")))
    await until_running(llm, 1)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await stream
    llm.shutdown()


async def test_a_signal_is_answered_under_the_callers_id(make_llm: MakeLLM) -> None:
    """A signal returns the policy's decision about a finished turn; an unknown turn has none."""
    llm = make_llm(policy_factory=SignalPolicyFactory())
    final = await last(llm.generate("Hello", SHORT, "turn-1", RequestContext(job=JobRef("job"))))
    receipt = await llm.tool_gap_started(final.request_id, [ToolCall("ls")])
    assert receipt is not None
    assert (receipt.request_id, receipt.job_id) == ("turn-1", "job")
    assert await llm.tool_gap_started("unknown", []) is None
    await llm.finish_job("job")


async def test_a_stop_string_ends_the_turn_before_its_signal(make_llm: MakeLLM) -> None:
    """When a stream has ended, the core knows it: a signal about the turn cannot overtake its end."""
    llm = make_llm(policy_factory=SignalPolicyFactory())
    token_ids = llm.tokenizer.encode("one two three four")
    params = SamplingParams(max_tokens=4000, replay_token_ids=token_ids, stop=["three"])
    final = await last(llm.generate("Hello", params, "turn", RequestContext(job=JobRef("job"))))
    assert (final.outputs[0].text, final.outputs[0].stop_reason) == ("one two ", "three")
    assert await all_blocks_free(llm)


async def test_signals_are_not_sent_to_a_policy_without_use_for_them(make_llm: MakeLLM) -> None:
    """Under FCFS a signal makes no round trip and returns no receipt."""
    llm = make_llm()
    final = await last(llm.generate("Hello", SHORT, "turn-1", RequestContext(job=JobRef("job"))))
    assert await llm.tool_gap_started(final.request_id, []) is None
    await llm.finish_job("job")


async def test_listeners_hear_of_every_message(make_llm: MakeLLM) -> None:
    """Listeners get the scheduler's gauges and the counts of all generated tokens, for metrics."""
    llm = make_llm()
    heard: list[tuple[SchedulerStats | None, IterationStats]] = []
    llm.add_stats_listener(lambda scheduler, iteration: heard.append((scheduler, iteration)))
    await last(llm.generate("Hello", SamplingParams(max_tokens=20, ignore_eos=True), "a"))
    assert sum(iteration.num_generation_tokens for _, iteration in heard) == 20
    assert [len(iteration.finished_requests) for _, iteration in heard][-1] == 1
    assert any(scheduler is not None and scheduler.num_running_reqs for scheduler, _ in heard)


async def test_pause_and_resume(make_llm: MakeLLM) -> None:
    """A request waits while paused and is served after resume. The cache can be reset when nothing runs."""
    llm = make_llm()
    await llm.pause()
    task = asyncio.create_task(last(llm.generate("Hello", SHORT, "a")))
    while not (await llm.statistics()).num_waiting:
        pass
    await llm.resume()
    await task
    assert await llm.reset_prefix_cache()
