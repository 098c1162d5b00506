"""The model that one request has selected: a name, and the adapter for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from engine.api.service.identity import ClientIdentity, request_context
from engine.api.service.tiers import ServiceTier, allowed_priority, served_tier
from engine.records.adapters import Adapter
from engine.records.messages import RequestContext

if TYPE_CHECKING:
    from engine.api.service.server import Server


@dataclass(frozen=True, slots=True)
class Model:
    """A name under which the server answers. One instance per request."""

    server: Server
    name: str
    adapter: Adapter | None

    def served_tier(
        self, tier: ServiceTier | None, asked_priority: int | None, context: RequestContext
    ) -> str | None:
        """The tier that the response reports; None if the request names none."""
        orders = self.server.engine.ready.orders_by_priority
        return served_tier(tier, asked_priority, context.priority, orders_by_priority=orders)

    def context(self, headers: Mapping[str, str], identity: ClientIdentity) -> RequestContext:
        """Returns the request's context from its headers and body."""
        server = self.server
        context = request_context(
            headers,
            identity,
            separates_owners=server.config.access.separates_owners,
            keeps_alive=server.sse_keep_alive_s is not None,
            job_headers=server.config.job_headers,
        )
        if server.quotas is not None:
            best = server.quotas.tier(context.owner)
            context = msgspec.structs.replace(context, priority=allowed_priority(identity.priority, best))
        if self.adapter is not None:
            context = msgspec.structs.replace(context, adapter=self.adapter)
        if identity.kv_transfer_params is None:
            return context
        kv_transfer = server.engine.kv_transfer.read(identity.kv_transfer_params)
        return msgspec.structs.replace(context, kv_transfer=kv_transfer)
