"""Text that clients put near the start of a prompt and that changes with every request.

A prefix cache ends at the first token that differs, so such a text costs the whole prompt, every turn. Only
text that is known to be for the vendor's own servers and useless to a model is removed:

* ``billing_header``: Claude Code opens ``system`` with ``x-anthropic-billing-header: cc_version=…;
  cc_entrypoint=…; cch=…;``, as a separate text block or (with some gateways) as the first line of a
  string. Its ``cch`` is a hash of the request.

Known and left alone, as they are meant for the model:

* The date in an agent's description of its environment: one new prompt a day.
* Claude Code's ``<total_tokens>`` and other reminders, sent as ``system`` messages among the others: harmless
  where they stand, as long as nothing moves them to the front (``anthropic/input.py`` keeps their place).
* The nonce with which load generators keep sessions apart ("cache bust"): sent in order to miss the cache.
"""

from __future__ import annotations

import re
from typing import Any

BILLING_HEADER = "billing_header"
_BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")


def without_billing_header(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Returns the chat, whose contents are strings, without the header that it begins with; None if it has
    none."""
    if not messages or messages[0]["role"] != "system":
        return None
    first, *others = messages
    found = _BILLING_HEADER.match(first["content"])
    if found is None:
        return None
    rest = first["content"][found.end() :]
    return [{**first, "content": rest}, *others] if rest or not others else others
