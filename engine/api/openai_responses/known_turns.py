"""Turns whose tokens this process still has: the next turn appends to them, without reading the history.

Only the data that a later turn needs is kept. The client's results never depend on it: an unknown turn is
read from the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from engine.api.openai_responses.input_items import MessageList
from engine.api.prompt.appended_chat import HistoryShape
from engine.api.prompt.chat_messages import Message
from engine.api.prompt.prompts import PromptSoFar
from engine.api.prompt_cache.fingerprint import PromptPrint, hash_of
from engine.api.service.identity import counts_in
from engine.api.turn.conversation import Conversation
from engine.api.turn.conversation_turn import TurnOutput
from engine.tokenization.prompt_encoder import extreme_tokens

MOST_TOKENS = 1 << 22
"""Maximum number of tokens that are kept, at 8 bytes each: the token ids themselves are shared."""


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """A turn that ended, and the inputs of its prompt."""

    prompt: PromptSoFar
    asked: bytes
    """See ``asked_of``."""
    earlier: tuple[str, ...]
    """The responses before it, oldest first."""
    call_ids: frozenset[str]
    """Ids of the calls that outputs may refer to, except those in its reply."""
    num_replies: int
    num_results: int
    """Numbers of replies and of tool results in its prompt."""
    left_out: tuple[str, ...]
    """Notes on the parts of its history that the model was not shown."""
    fingerprint: PromptPrint | None


def asked_of(conversation: Conversation, instructions: str | None, model_name: str) -> bytes:
    """A hash of the inputs of a prompt except its messages: a turn may append only if the hash is the
    same."""
    adapter = conversation.context.adapter
    adapter_key = None if adapter is None else adapter.key
    return hash_of(
        [model_name, adapter_key, instructions, conversation.tools, conversation.chat_template_kwargs]
    )


@dataclass(slots=True)
class _Size:
    num_tokens: int = 0


class KnownTurns:
    """One owner's view of the known turns. Bounded: the least recently used are forgotten first."""

    def __init__(self, max_tokens: int = MOST_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._turns: OrderedDict[tuple[str | None, str], KnownTurn] = OrderedDict()
        self._size = _Size()
        self._owner: str | None = None

    def of(self, owner: str | None) -> KnownTurns:
        view = copy(self)
        view._owner = owner
        return view

    def get(self, response_id: str) -> KnownTurn | None:
        return self._turns.get((self._owner, response_id))

    def put(self, response_id: str, turn: KnownTurn) -> None:
        """Keeps a turn that has just ended. The turn before it is the next to be forgotten: few turns are
        continued twice."""
        self.forget(response_id)
        self._turns[self._owner, response_id] = turn
        for before in turn.earlier[-1:]:
            if (self._owner, before) in self._turns:
                self._turns.move_to_end((self._owner, before), last=False)
        self._size.num_tokens += len(turn.prompt.token_ids)
        while self._size.num_tokens > self._max_tokens:
            self._remove(next(iter(self._turns)))

    def forget(self, response_id: str) -> None:
        """Forgets a response that was deleted."""
        if (self._owner, response_id) in self._turns:
            self._remove((self._owner, response_id))

    def forget_all(self) -> None:
        """Forgets the turns of all owners: each is then read from the store."""
        self._turns.clear()
        self._size.num_tokens = 0

    def _remove(self, key: tuple[str | None, str]) -> None:
        self._size.num_tokens -= len(self._turns.pop(key).prompt.token_ids)


def known_turn(
    conversation: Conversation,
    known: KnownTurn | None,
    before: Sequence[str],
    asked: bytes,
    messages: MessageList,
    last: TurnOutput,
    reply_ids: list[int],
    fingerprint: PromptPrint,
) -> KnownTurn | None:
    """Returns what to keep of a turn that ended with ``last`` and replied with these tokens. ``before``: the
    responses that were loaded for it, after the ``known`` ones.

    None if its prompt has more than can be kept: media, or tools among its items. None, too, if the model
    has not ended the reply itself: the text after it would differ from what a template writes.
    """
    [answer] = last.answers
    is_whole = answer.raw.finish_reason == "stop" and not isinstance(answer.raw.stop_reason, str)
    if not is_whole or not reply_ids or messages.tools or conversation.has_media:
        return None
    prompt = last.output.prompt_token_ids
    num_replies, num_results = counts_in(messages.messages)
    if known is not None:
        num_replies = num_replies + known.num_replies
        num_results = num_results + known.num_results
    return KnownTurn(
        prompt=PromptSoFar(
            turn_id=conversation.request_id,
            token_ids=[*prompt, *reply_ids],
            highest=max(*extreme_tokens(prompt), *reply_ids),
            shape=_shape(messages.messages, known, bool(conversation.tools or num_results)),
        ),
        asked=asked,
        earlier=(*(known.earlier if known else ()), *before),
        call_ids=frozenset(messages.call_ids),
        num_replies=num_replies,
        num_results=num_results,
        left_out=(*(known.left_out if known else ()), *messages.left_out.notes),
        fingerprint=fingerprint,
    )


def _shape(messages: Sequence[Message], known: KnownTurn | None, has_tools: bool) -> HistoryShape:
    before = HistoryShape(False, False, False) if known is None else known.prompt.shape
    return HistoryShape(
        has_system=before.has_system or any(message["role"] == "system" for message in messages),
        has_tools=before.has_tools or has_tools,
        has_reasoning=before.has_reasoning or any(message.get("reasoning") for message in messages),
    )
