"""The core by itself: a grammar that cannot be compiled ends its own request, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.clock import MonotonicClock
from engine.core.policy import fcfs
from engine.core_process.engine_core import EngineCore
from engine.frontend.llm import engine_config
from engine.records.messages import AbortRequest, EngineCoreOutput, EngineCoreRequest, FinishReason
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend import TokenTable
from engine.structured_output.bitmask_filler import BitmaskFiller
from engine.structured_output.compiler import GrammarCompiler
from engine.testing import FakeExecutorFactory

DIGITS = StructuredOutputsParams(regex="[0-9]{5}")
LARGE = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,200}$"} for i in range(2000)},
    }
)


@pytest.fixture
def core(model_folder: Path) -> Iterator[EngineCore]:
    core = EngineCore(engine_config(str(model_folder)), FakeExecutorFactory(), fcfs, MonotonicClock())
    yield core
    core.utilities.check_invariants()
    core.close()


def add(
    core: EngineCore, request_id: str, wanted: StructuredOutputsParams | None = None
) -> dict[str, EngineCoreOutput]:
    """Adds a request; returns the outputs that ended at once, by request."""
    params = SamplingParams(max_tokens=20, structured_outputs=wanted)
    outputs = core.add_request(EngineCoreRequest(request_id, [1, 2, 3], params, core.now()))
    return {output.request_id: output for output in outputs}


def run(core: EngineCore, count: int) -> dict[str, EngineCoreOutput]:
    """Returns the last output of each request, once ``count`` requests have ended."""
    ended: dict[str, EngineCoreOutput] = {}
    while len(ended) < count and core.wait_for_work():
        message = core.step()
        outputs = message.outputs if message is not None else []
        ended.update({output.request_id: output for output in outputs if output.finished})
    return ended


@pytest.mark.parametrize(
    "wrong",
    [
        StructuredOutputsParams(regex="a("),
        StructuredOutputsParams(),
        StructuredOutputsParams(json={"type": "strin"}),
    ],
)
def test_a_wrong_grammar_ends_its_own_request(core: EngineCore, wrong: StructuredOutputsParams) -> None:
    """A wrong grammar ends its request with the reason; others go on. (API servers refuse it earlier.)"""
    ended: dict[str, EngineCoreOutput] = {}
    for request_id, wanted in (("wrong", wrong), ("right", DIGITS), ("plain", None), ("again", wrong)):
        ended |= add(core, request_id, wanted)
    ended |= run(core, 4 - len(ended))
    for request_id in ("wrong", "again"):
        assert ended[request_id].finish_reason is FinishReason.ERROR
        assert "structured_outputs" in str(ended[request_id].stop_reason)
    assert ended["right"].finish_reason is FinishReason.STOP
    assert ended["plain"].finish_reason is FinishReason.LENGTH


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(core: EngineCore) -> None:
    """The request ends at once, and its grammar leaves nothing behind when it is compiled."""
    add(core, "gone", LARGE)
    (output,) = core.abort_requests(AbortRequest(["gone"]))
    assert output.finish_reason is FinishReason.ABORT
    add(core, "next", LARGE)
    assert run(core, 1).keys() == {"next"}


def test_a_step_that_comes_back_after_the_end_gets_no_masks() -> None:
    """Masks are cancelled, whether they were reserved before the filler closed or after."""

    def no_tokens() -> TokenTable:
        raise AssertionError("no grammar is compiled")

    filler = BitmaskFiller(GrammarCompiler(no_tokens), 512)
    before = filler.reserve()
    filler.close()
    after = filler.reserve()
    for masks in (before, after):
        filler.fill(masks, {})
        assert masks.cancelled()


def test_a_core_can_stop_while_it_compiles(model_folder: Path) -> None:
    """``close`` does not wait for running compilations."""
    core = EngineCore(engine_config(str(model_folder)), FakeExecutorFactory(), fcfs, MonotonicClock())
    for number in range(4):
        add(core, f"r{number}", StructuredOutputsParams(json=LARGE.json, disable_any_whitespace=bool(number)))
    core.request_stop()
    assert not core.wait_for_work()
    core.close()
