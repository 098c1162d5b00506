"""An agent's job against real servers, run as its framework would: what is kept, learned and traced."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from eval.errors import ServerError
from eval.load.server_process import ServerProcess
from eval.workloads.scheduler_trace import read_scheduler_trace
from tracing.events import (
    JobEvent,
    PinEvent,
    PrefixCacheEvent,
    StepDecision,
    StepSnapshot,
    TraceEnd,
    TraceHeader,
)
from tracing.reader import read_trace

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "pytest -q tests"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "qwen3", max_position_embeddings=2048)


def arguments(model: Path, folder: Path, trace: str) -> list[str]:
    return [
        *(str(model), "--host", "127.0.0.1", "--port", "0", "--num-gpu-blocks-override", "300"),
        *("--estimator-state", str(folder / "tools.state"), "--trace", str(folder / trace)),
    ]


def run_job(
    base_url: str, job_id: str, num_turns: int, *, finish: bool = True, named_from: int = 0
) -> list[dict[str, Any]]:
    """Runs a conversation of tool calls through the openai client; returns the receipt of each turn."""
    forced = httpx.post(
        f"{base_url}/tokenize", json={"prompt": CALL + "<|im_end|>", "add_special_tokens": False}
    ).json()["tokens"]
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "You fix bugs. " * 20},
        {"role": "user", "content": f"Job {job_id}: the tests fail."},
    ]
    receipts = []
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(num_turns):
            last = finish and turn == num_turns - 1
            name = {"job_id": job_id} if turn >= named_from else {}
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=messages,
                tools=TOOLS,
                extra_body={**name, "is_last_step": last, "replay_token_ids": forced},
            )
            message = answer.choices[0].message
            assert message.tool_calls is not None
            assert answer.choices[0].finish_reason == "tool_calls"
            messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1 failed"})
            receipts.append(answer.model_dump()["usage"]["receipt"])
    return receipts


@pytest.mark.slow
def test_a_job_is_kept_learned_and_traced_across_a_restart(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn finds the previous one's KV; a new server knows the tool; the trace records it all."""
    with ServerProcess(arguments(model, tmp_path, "first.jsonl"), tmp_path / "first.log") as server:
        receipts = run_job(server.base_url, "a", 4)
        assert server.stop() == 0
    assert [receipt["turn"] for receipt in receipts] == [1, 2, 3, 4]
    assert receipts[0]["expected_tool_s"] is None
    for before, after in pairwise(receipts):
        assert before["pinned_tokens"] > 0
        assert before["ttl_s"] > 0
        assert after["previous_pin"] == "handed_over"
        assert after["cached_tokens"] >= before["prompt_tokens"] - 16
        assert after["recomputed_tokens"] == 0
        assert after["gap_s"] >= 0
    assert receipts[-1]["pinned_tokens"] == 0
    check_trace(tmp_path / "first.jsonl")

    with ServerProcess(arguments(model, tmp_path, "second.jsonl"), tmp_path / "second.log") as server:
        (first_turn, _) = run_job(server.base_url, "b", 2)
        named_late = run_job(server.base_url, "late", 4, named_from=2)
        run_job(server.base_url, "left-open", 3, finish=False)
    check_every_pin_ended(tmp_path / "second.jsonl")
    assert [receipt["turn"] for receipt in named_late] == [1, 2, 3, 4]
    check_named_late(tmp_path / "second.jsonl", capsys)
    assert first_turn["expected_tool_s"] == pytest.approx(receipts[1]["gap_s"], abs=0.5)
    for trace in ("first.jsonl", "second.jsonl"):  # the second server began with what the first had learned
        assert main(["trace", "replay", str(tmp_path / trace)]) == 0


def check_named_late(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job without a name in its first turns is one job for every reader of the trace."""
    capsys.readouterr()
    assert main(["trace", "jobs", str(path), "--json"]) == 0
    jobs = {job["job_id"]: job for job in json.loads(capsys.readouterr().out)}
    assert {name: job["num_turns"] for name, job in jobs.items()} == {"b": 2, "left-open": 3, "late": 4}
    assert jobs["late"]["pins_handed_over"] == 3
    assert main(["trace", "explain", str(path), "late", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    followed_by = [gap["next_req_id"] for gap in job["gaps"]]
    assert followed_by == [*(turn["req_id"] for turn in job["turns"][1:]), None]
    run_again, _ = read_scheduler_trace(path)
    assert [len(each.turns) for each in run_again if each.job_id == "late"] == [4]
    assert main(["trace", "validate", str(path)]) == 0


def check_every_pin_ended(path: Path) -> None:
    """Every pin, also one held when the server stopped, has exactly one end in the trace."""
    pins = [e for e in read_trace(str(path)) if isinstance(e, PinEvent)]
    created = [e.pin_id for e in pins if e.kind == "created"]
    assert created == [e.pin_id for e in pins if e.kind == "ended"]
    assert pins[-1].cause == "released"


def check_trace(path: Path) -> None:
    header, *events, end = list(read_trace(str(path)))
    assert isinstance(header, TraceHeader)
    assert header.policy == "continuum"
    assert isinstance(end, TraceEnd)
    assert end.dropped == 0

    steps = [e for e in events if isinstance(e, StepSnapshot | StepDecision)]
    for number, pair in groupby(steps, key=lambda e: e.step):
        snapshot, decision = pair
        assert isinstance(snapshot, StepSnapshot), number
        assert isinstance(decision, StepDecision)
        assert decision.total_tokens <= snapshot.token_budget

    hits = [e for e in events if isinstance(e, PrefixCacheEvent)]
    assert [e.job_id for e in hits] == ["a"] * 4
    assert all(e.hit_tokens > 0 for e in hits[1:])
    pins = [e for e in events if isinstance(e, PinEvent)]
    assert sum(e.kind == "created" for e in pins) == 3
    assert [e.cause for e in pins if e.kind == "ended"] == ["handed_over"] * 3
    assert any("bash/pytest" in str(e.inputs.get("tools")) for e in pins if e.kind == "decided")
    kinds = [e.kind for e in events if isinstance(e, JobEvent)]
    assert kinds.count("tools_started") == 3
    assert kinds[-1] == "finished"


@pytest.mark.slow
def test_an_estimator_state_that_is_not_ours_stops_the_start(model: Path, tmp_path: Path) -> None:
    """A foreign estimator state stops the start with one sentence and exit code 2, before it serves."""
    (tmp_path / "tools.state").write_text(json.dumps({"format": "other"}))
    server = ServerProcess(arguments(model, tmp_path, "trace.jsonl"), tmp_path / "log")
    with pytest.raises(ServerError, match="exit code 2"), server:
        pass
    log = (tmp_path / "log").read_text()
    assert "estimator state" in log
    assert "Traceback" not in log
