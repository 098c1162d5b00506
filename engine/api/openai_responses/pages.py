"""Pagination of item lists."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request

from engine.api.endpoints import whole_number
from engine.api.openai_responses.input_items import Item
from engine.errors import RequestError

MAX_PAGE = 100


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def page_of(request: Request, items: list[Item]) -> ItemList:
    """Returns the page of these items, given oldest first, that the query requests; by default newest
    first."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'.", "order")
    limit = whole_number(request, "limit", 20, 1, MAX_PAGE)
    return _page(items if order == "asc" else items[::-1], request.query_params.get("after"), limit)


def list_of(items: list[Item], *, has_more: bool = False) -> ItemList:
    """Returns these items as a list."""
    ids = [str(item["id"]) for item in items]
    return ItemList(
        data=items,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=has_more,
    )


def _page(items: list[Item], after: str | None, limit: int) -> ItemList:
    ids = [str(item["id"]) for item in items]
    if after is not None and after not in ids:
        raise RequestError("after must be the id of one of the items.", "after")
    start = 0 if after is None else ids.index(after) + 1
    return list_of(items[start : start + limit], has_more=start + limit < len(items))
