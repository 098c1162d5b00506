"""The turns of a job, and how a response becomes part of the next prompt. Sends nothing itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from eval.load.client import Reply
from eval.load.job_tokens import JobTokens, Tokens
from eval.load.server_type import Message
from eval.workloads.job import Job

Tokenize = Callable[[str], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One turn to send."""

    prompt: list[Message] | list[int]
    max_tokens: int
    forced_token_ids: list[int] | None
    """The response to force; None: the model generates it."""
    output_text: str | None = None
    """The recorded response, if it has a text."""
    prefix_tokens: int | None = None
    """Number of tokens of the previous turn at its start; None: all of them."""

    def is_answered_as_recorded(self, reply: Reply) -> bool:
        """Whether the response is the recorded one, by tokens if the server returns them, else by text."""
        if self.forced_token_ids is not None and reply.token_ids is not None:
            return reply.token_ids == self.forced_token_ids
        return reply.text == self.output_text


class Conversation(Protocol):
    """The client's side of a job. Its turns are sent in order, each after the response to the one before."""

    def ask(self, index: int) -> Ask:
        """The request of turn ``index``, from 0."""
        ...

    async def take(self, reply: Reply) -> None:
        """Takes the response to the last turn asked."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One turn of a chat."""

    input_text: str
    output_text: str
    """The recorded response, possibly cut to a limit."""
    output_token_ids: list[int] | None
    """The response's tokens with the end-of-turn token; None if it is not forced."""
    max_tokens: int
    num_kept: int
    """Number of earlier turns that stay in the history; later ones are dropped."""


class ChatConversation:
    """A conversation of messages, both the client's and the server's."""

    def __init__(self, system_text: str, turns: Sequence[ChatTurn], *, forced: bool) -> None:
        self.turns = turns
        self._system_text = system_text
        self._forced = forced
        self._history: list[tuple[str, str]] = []
        self._asked: ChatTurn | None = None

    def ask(self, index: int) -> Ask:
        turn = self._asked = self.turns[index]
        del self._history[turn.num_kept :]
        return Ask(
            prompt=chat_messages(self._system_text, self._history, turn.input_text),
            max_tokens=turn.max_tokens,
            forced_token_ids=turn.output_token_ids if self._forced else None,
            output_text=turn.output_text,
        )

    async def take(self, reply: Reply) -> None:
        assert self._asked is not None
        # A forced response is kept as planned: a tool parser may have removed the call from its text.
        self._history.append(
            (self._asked.input_text, self._asked.output_text if self._forced else reply.text)
        )


class TokenConversation:
    """Prompts of token ids, with exactly the recorded lengths and shared prefixes."""

    def __init__(
        self,
        job: Job,
        tokens: JobTokens,
        outputs: Sequence[Tokens],
        *,
        forced: bool,
        tokenize: Tokenize | None,
    ) -> None:
        self._job = job
        self._tokens = tokens
        self._outputs = outputs
        self._forced = forced
        self._tokenize = tokenize
        self._prompt: Tokens = np.empty(0, dtype=np.int64)
        self._history: Tokens = self._prompt
        self._output: Tokens = self._prompt

    def ask(self, index: int) -> Ask:
        turn = self._job.turns[index]
        self._prompt = self._tokens.prompt(index, self._history)
        self._output = self._outputs[index]
        return Ask(
            prompt=self._prompt.tolist(),
            max_tokens=len(self._output),
            forced_token_ids=self._output.tolist() if self._forced else None,
            prefix_tokens=turn.prefix_tokens,
        )

    async def take(self, reply: Reply) -> None:
        self._history = np.concatenate((self._prompt, await self._answer(reply)))

    async def _answer(self, reply: Reply) -> Tokens:
        """Returns the response's tokens if they are known, else synthetic ones of the recorded number."""
        if self._forced:
            return self._output
        if reply.token_ids is not None:
            return np.array(reply.token_ids, dtype=np.int64)
        if self._tokenize is not None:
            return np.array(await self._tokenize(reply.text), dtype=np.int64)
        return self._output


def chat_messages(system_text: str, history: Sequence[tuple[str, str]], input_text: str) -> list[Message]:
    """The messages of a turn: the history, then the new input."""
    messages: list[Message] = [{"role": "system", "content": system_text}] if system_text else []
    for said, answered in history:
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": input_text})
    return messages
