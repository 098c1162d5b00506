"""Shows the progress of a replay: one line every few seconds, in place on a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from eval.load.client import ServerClient

INTERVAL_S = 3.0


@dataclass(slots=True)
class Progress:
    """Counts of a running replay."""

    name: str
    num_jobs: int
    num_turns: int
    jobs_done: int = 0
    turns_done: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: int = 0

    def line(self, elapsed_s: float, pins: float | None) -> str:
        parts = [
            f"{self.name}: {elapsed_s:4.0f} s",
            f"jobs {self.jobs_done}/{self.num_jobs}",
            f"turns {self.turns_done}/{self.num_turns}",
            f"prompt {self.prompt_tokens:,}",
            f"cached {self.cached_tokens:,}",
            f"out {self.output_tokens:,}",
            f"errors {self.errors}",
        ]
        if pins is not None:
            parts.append(f"pins {pins:.0f}")
        return "  ".join(parts)


@asynccontextmanager
async def shown(progress: Progress, client: ServerClient) -> AsyncIterator[None]:
    """Prints ``progress`` while the body runs, and once more at its end."""
    started = time.monotonic()
    ticker = asyncio.create_task(_tick(progress, client, started))
    try:
        yield
    finally:
        ticker.cancel()
        _print(progress.line(time.monotonic() - started, None), last=True)


async def _tick(progress: Progress, client: ServerClient, started: float) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        pins = (await client.metrics()).pins
        _print(progress.line(time.monotonic() - started, pins), last=False)


def _print(line: str, *, last: bool) -> None:
    out = sys.stderr
    if out.isatty():
        out.write(f"\r{line}\x1b[K" + ("\n" if last else ""))
    else:
        out.write(line + "\n")
    out.flush()
