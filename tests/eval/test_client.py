"""Reading a streamed answer, byte for byte as servers send it."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator

import pytest

from continuum.cli.main import main
from eval.load.client import TurnFailedError, read_reply

ROLE = 'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
TEXT = 'data: {"choices":[{"index":0,"delta":{"content":"ls "},"finish_reason":null}]}'
END = 'data: {"choices":[{"index":0,"delta":{"content":"-l"},"finish_reason":"stop"}]}'
USAGE = (
    'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,'
    '"prompt_tokens_details":{"cached_tokens":32},"receipt":{"request_id":"r","job_id":"j","turn":2,"ttl_s":1.5}}}'
)
DONE = "data: [DONE]"


async def _lines(*lines: str) -> AsyncIterator[bytes]:
    for line in lines:
        yield line.encode()


async def test_a_streamed_answer_is_read_to_its_end() -> None:
    """Text, finish reason, token counts and receipt are kept; comments are skipped."""
    reply = await read_reply(
        _lines(": keep-alive", ROLE, "", TEXT, "", END, USAGE, DONE), started=time.perf_counter()
    )
    assert (reply.text, reply.finish_reason) == ("ls -l", "stop")
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (40, 32, 3)
    assert reply.receipt is not None
    assert (reply.receipt.turn, reply.receipt.ttl_s) == (2, 1.5)
    assert 0 <= reply.ttft_s <= reply.latency_s


@pytest.mark.parametrize(
    "said",
    [
        '{"delta":{"content":"w"}}',
        '{"delta":{"content":null,"reasoning":"hm"}}',
        '{"delta":{"reasoning_content":"hm"}}',
        '{"delta":{"tool_calls":[{"index":0,"function":{"name":"ls","arguments":""}}]}}',
        '{"delta":{"refusal":"no"}}',
        '{"text":"w"}',
        '{"text":"","token_ids":[5]}',
        '{"delta":{},"finish_reason":"stop"}',
    ],
)
async def test_the_first_token_is_the_first_that_was_said(said: str) -> None:
    """The first token is the first text, reasoning or call, else the end: never the opening chunk or an empty
    one, however early."""
    moments: list[float] = []

    async def lines() -> AsyncIterator[bytes]:
        for opening in (ROLE, 'data: {"choices":[{"text":""}]}', 'data: {"choices":[{"delta":{}}]}'):
            yield opening.encode()
        moments.append(time.perf_counter())
        yield f'data: {{"choices":[{said}]}}'.encode()
        moments.append(time.perf_counter())
        yield TEXT.encode()
        yield DONE.encode()

    reply = await read_reply(lines(), started=0.0)
    assert moments[0] <= reply.ttft_s <= moments[1]


async def test_an_answer_that_says_nothing_has_its_end_for_a_first_token() -> None:
    """The end of an empty answer counts as its first token."""
    reply = await read_reply(_lines(ROLE, DONE), started=time.perf_counter())
    assert (reply.text, reply.ttft_s) == ("", reply.latency_s)


async def test_a_server_that_counts_no_cached_tokens_is_read_too() -> None:
    """Without usage details the number of cached tokens is unknown, and nothing fails."""
    usage = (
        'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3,"prompt_tokens_details":null}}'
    )
    reply = await read_reply(_lines(TEXT, usage, DONE), started=0.0)
    assert (reply.prompt_tokens, reply.cached_tokens, reply.receipt) == (4, None, None)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([ROLE, 'data: {"error":{"message":"the core died"}}', DONE], "the core died"),
        ([ROLE, TEXT], "ended before"),
        ([USAGE, DONE], "no choices"),
    ],
)
async def test_a_broken_stream_is_a_failed_turn(lines: list[str], complaint: str) -> None:
    """With HTTP 200, an error, an early end or an empty answer still fails the turn."""
    with pytest.raises(TurnFailedError, match=complaint):
        await read_reply(_lines(*lines), started=0.0)


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """An unreachable server gives exit code 1 and the address, without a traceback."""
    assert main(["bench", "--base-url", "http://127.0.0.1:9", "--workload", "synthetic", "--jobs", "1"]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "preparing" not in x]
    assert line.startswith("continuum: Cannot reach the server at http://127.0.0.1:9: ")


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000",
        "ftp://127.0.0.1",
        "http://",
        "http://256.1.1.1:80",
        "http://127.0.0.1:99999",
        "http://[::1",
    ],
)
def test_an_address_that_cannot_be_is_one_sentence(capsys: pytest.CaptureFixture[str], address: str) -> None:
    """An invalid address gives exit code 1 and the address as typed."""
    assert main(["bench", "--base-url", address, "--workload", "synthetic", "--jobs", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"continuum: {address!r} is not the address of a server")


def test_a_server_that_does_not_answer_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that accepts connections but never answers gives one sentence once the timeout is over."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = ["bench", "--base-url", address, "--workload", "synthetic", "--timeout-s", "0.05"]
        assert main(command) == 1
    complaint = capsys.readouterr().err
    assert complaint == f"continuum: Cannot reach the server at {address}: it does not respond.\n"


@pytest.mark.parametrize(
    "flag",
    [
        "--jobs=0",
        "--concurrency=-1",
        "--time-scale=-1",
        "--gap-cap-s=inf",
        "--max-turns=0",
        "--rate=0",
    ],
)
def test_a_senseless_number_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """The error names the flag and its valid values."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--workload", "synthetic", flag])
    assert ended.value.code == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag.partition('=')[0]}: must be" in complaint


def test_a_workload_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The file is checked before the server is contacted."""
    assert main(["bench", "--workload", "nowhere.jsonl"]) == 1
    assert "Cannot read the workload nowhere.jsonl" in capsys.readouterr().err
