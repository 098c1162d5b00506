"""Agents that use a server while a page is viewed: jobs of some turns, with tool calls of different lengths.

The replies are given (``replay_token_ids``), so that every turn calls the intended tool; all else is real.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that an agent runs, and its duration."""

    name: str
    command: str
    shortest_s: float
    longest_s: float


TOOLS = (
    Tool("bash", "ls -la src", 0.3, 0.8),
    Tool("bash", "pytest -q tests", 2.0, 5.0),
    Tool("read_file", "src/parser.py", 0.2, 0.5),
    Tool("search", "def parse", 0.8, 2.0),
)
SYSTEM = "You are a careful engineer who mends programs. Look before you change anything. " * 6


class Crowd:
    """Runs a number of agents, each one job after another, until it is stopped."""

    def __init__(self, base_url: str, num_agents: int, headers: dict[str, str], prompt_words: int) -> None:
        self._stop = threading.Event()
        self._numbers = count(1)
        self._headers = headers
        self._base_url = base_url
        self._prompt_words = prompt_words
        self.errors: list[str] = []
        with httpx.Client(base_url=base_url, headers=headers, timeout=60) as client:
            self._replies = [_reply_tokens(client, tool) for tool in TOOLS]
        self._threads = [
            threading.Thread(target=self._work, args=(seed,), daemon=True) for seed in range(num_agents)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            with httpx.Client(base_url=self._base_url, headers=self._headers, timeout=60) as client:
                while not self._stop.is_set():
                    self._run_job(client, f"fix-{next(self._numbers):03}", chance)
                    self._stop.wait(chance.uniform(0.1, 1.5))
        except httpx.HTTPError as error:
            if not self._stop.is_set():
                self.errors.append(repr(error))

    def _run_job(self, client: httpx.Client, job_id: str, chance: random.Random) -> None:
        words = " ".join(chance.choices(SYSTEM.split(), k=chance.randint(20, self._prompt_words)))
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Job {job_id}: {words}"},
        ]
        num_turns = chance.randint(3, 7)
        for turn in range(num_turns):
            place = chance.randrange(len(TOOLS))
            body = {
                "messages": messages,
                "tools": [{"type": "function", "function": {"name": "bash", "parameters": {}}}],
                "job_id": job_id,
                "is_last_step": turn == num_turns - 1,
                "replay_token_ids": self._replies[place],
            }
            answer = client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            call_id = message["tool_calls"][0]["id"]
            result = " ".join(chance.choices(SYSTEM.split(), k=chance.randint(5, 40)))
            messages += [message, {"role": "tool", "tool_call_id": call_id, "content": result}]
            tool = TOOLS[place]
            if self._stop.wait(chance.uniform(tool.shortest_s, tool.longest_s)):
                return


def _reply_tokens(client: httpx.Client, tool: Tool) -> list[int]:
    call = json.dumps({"name": tool.name, "arguments": {"command": tool.command}})
    text = f"I look at this next.\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    answer = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens


@contextmanager
def working_crowd(
    base_url: str, num_agents: int = 8, headers: dict[str, str] | None = None, prompt_words: int = 60
) -> Iterator[Crowd]:
    """Runs agents during the ``with`` block; an error in an agent fails the test."""
    crowd = Crowd(base_url, num_agents, headers or {}, prompt_words)
    try:
        yield crowd
    finally:
        crowd.stop()
    assert crowd.errors == []
