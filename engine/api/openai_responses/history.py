"""The inputs of a request: earlier responses, referenced items, and its own items."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from engine.api.openai_responses.input_items import Item, MessageList, easy_items, kind_of
from engine.api.openai_responses.items import item_id, response_of_item
from engine.api.openai_responses.known_turns import KnownTurn, KnownTurns
from engine.api.openai_responses.request import ResponsesRequest
from engine.api.openai_responses.store import PastTurn, ResponseNotStoredError, ResponseStore, StoredResponse
from engine.api.prompt.left_out import LeftOut
from engine.errors import RequestError

MAX_ITEMS = 20_000
"""Maximum number of items of one request; a job of a thousand turns has a fifth of that."""

_OWN_ITEMS = 0x8000
"""The first number of a request's own items; those of the model's reply are numbered from 0."""
_ID_KINDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(slots=True)
class History:
    """Earlier turns, oldest first, and the request's own items."""

    before: list[PastTurn] = field(default_factory=list)
    own: list[Item] = field(default_factory=list)
    known: KnownTurn | None = None
    """The last turn if it is known; earlier turns were not loaded then."""

    @property
    def previous(self) -> PastTurn | None:
        return self.before[-1] if self.before else None

    def messages(self, instructions: str | None, left_out: LeftOut) -> MessageList:
        """Returns the chat for the model; for a known turn only its reply and what follows. Instructions of
        earlier turns are not included."""
        known = self.known
        messages = MessageList(
            instructions if known is None else None, left_out, known.call_ids if known else ()
        )
        for stored in self.before:
            if known is None:
                messages.extend(stored.input, f"{stored.response.id}.input")
            messages.extend(output_items(stored), f"{stored.response.id}.output")
        messages.extend(self.own, "input", ends_with_new=True)
        return messages


def output_items(stored: StoredResponse | PastTurn) -> list[Item]:
    """The reply as items, in the form in which clients send it back."""
    items: list[Item] = [msgspec.to_builtins(item) for item in stored.response.output]
    return items


def stored_items(chain: list[PastTurn]) -> list[Item]:
    """Returns all items that the last response of a chain answers, oldest first."""
    items: list[Item] = []
    for stored in chain:
        items += stored.input
        items += output_items(stored) if stored is not chain[-1] else []
    return items


async def load_history(
    store: ResponseStore, body: ResponsesRequest, response_id: str, turns: KnownTurns | None = None
) -> History:
    """Loads the history; only the last turn if ``turns`` knows it. RequestError if a response is not stored,
    or an item is invalid."""
    items = easy_items(body.input) if body.input else []
    if len(items) > MAX_ITEMS:
        raise RequestError(f"input has {len(items)} items; at most {MAX_ITEMS} are taken.", "input")
    own = [await _resolved(store, item, f"input[{index}]") for index, item in enumerate(items)]
    history = History(own=list(with_ids(own, response_id)))
    previous = body.previous_response_id
    field_at_fault = "previous_response_id"
    if (named := body.conversation_name) is not None:
        previous, field_at_fault = await store.newest(named), "conversation"
        if previous is None:
            raise ResponseNotStoredError(f"Conversation {named!r}", store.limits, field_at_fault)
    if previous is None:
        return history
    known = None if turns is None else turns.get(previous)
    tip = None if known is None else await store.tip(previous, known.earlier)
    if tip is not None:
        history.before = [tip]
        history.known = known
    else:
        history.before = await _chain(store, previous, field_at_fault)
    return history


async def _chain(store: ResponseStore, previous: str, field_at_fault: str) -> list[PastTurn]:
    before = await store.chain(previous, field_at_fault)
    status = before[-1].response.status
    if status not in ("completed", "incomplete"):
        raise RequestError(f"Response {previous!r} is {status}: it cannot be continued.", field_at_fault)
    return before


async def _resolved(store: ResponseStore, item: Item, where: str) -> Item:
    """Returns the item that a reference names; other items unchanged."""
    kind = kind_of(item)
    if kind is None:  # checked before it gets an id, with which it would look like a reference
        raise RequestError(f"{where}.type is missing.", f"{where}.type")
    if kind != "item_reference":
        return item
    referenced = item.get("id")
    made_by = response_of_item(referenced) if isinstance(referenced, str) else None
    stored = await store.get(made_by) if made_by is not None else None
    if stored is not None:
        for known in (*output_items(stored), *stored.input):
            if known.get("id") == referenced:
                return known
    raise ResponseNotStoredError(f"The item of {where}", store.limits, f"{where}.id")


def with_ids(items: Iterable[Item], response_id: str) -> Iterable[Item]:
    """Returns the items, each with the client's id or a new one."""
    for index, item in enumerate(items):
        kind = kind_of(item)
        prefix = _ID_KINDS.get(kind, "item") if isinstance(kind, str) else "item"
        yield {"id": item_id(prefix, response_id, _OWN_ITEMS + index), **_without_null_id(item)}


def _without_null_id(item: Item) -> Item:
    return item if item.get("id") is not None else {key: item[key] for key in item if key != "id"}
