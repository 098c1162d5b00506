"""Promises about counting tokens: bounded memory, exact counts, and no other request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.tokenization.text_cuts import MAX_PART_CHARS
from tests.api.server import Server

TEXT = "The files said: 12, and the user's 7. " * 25_000
"""Nearly a megabyte; tokenizing it at once takes 300 MB."""
MAX_GROWTH_KIB = 128 * 1024
MAX_WAIT_S = 2.0


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


ENDPOINTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/tokenize": lambda text: {"prompt": text},
    "/v1/messages/count_tokens": chat,
    "/v1/responses/input_tokens": lambda text: {"input": text},
}


def counted(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text[:300]
    body = answer.json()
    return int(body.get("count") or body["input_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
def test_long_texts_are_counted_exactly_in_bounded_memory(server: Server, model: Path, path: str) -> None:
    """Two long texts are counted at once, and other requests are answered meanwhile."""
    growth_kib, counts, waits = asyncio.run(_count_twice(server, path, ENDPOINTS[path](TEXT)))
    around = counted(httpx.post(server.url + path, json=ENDPOINTS[path](". "))) - len(_tokens(model, ". "))
    assert counts == [around + len(_tokens(model, TEXT))] * 2
    assert growth_kib < MAX_GROWTH_KIB
    assert max(waits) < MAX_WAIT_S


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_word_of_megabytes_is_refused_with_the_limit(http: httpx.Client, path: str) -> None:
    """A word of megabytes cannot be counted in pieces, so it is refused with the limit in the error."""
    answer = http.post(path, json=ENDPOINTS[path]("x" * (MAX_PART_CHARS + 1)))
    assert answer.status_code == 400
    assert str(MAX_PART_CHARS) in answer.text


async def _count_twice(server: Server, path: str, body: dict[str, Any]) -> tuple[int, list[int], list[float]]:
    """Returns the peak growth of memory in KiB, both counts, and the latencies of a probe meanwhile."""
    process = Path(f"/proc/{server.process.pid}")
    (process / "clear_refs").write_text("5")  # Resets the peak.
    before = _highest_kib(process)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        counting = asyncio.gather(*(http.post(path, json=body) for _ in range(2)))
        waits: list[float] = []
        while not counting.done():
            waits.append((await http.get("/health")).elapsed.total_seconds())
            await asyncio.sleep(0.02)
        return _highest_kib(process) - before, [counted(answer) for answer in await counting], waits


def _highest_kib(process: Path) -> int:
    return int((process / "status").read_text().split("VmHWM:")[1].split()[0])


def _tokens(model: Path, text: str) -> list[int]:
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return tokens
