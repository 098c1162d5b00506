"""Holds each key to its quotas, and counts what it uses.

A quota is checked before work begins; what a request then generates may exceed it, and counts against the
next one. Times are Unix times.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from engine.api.errors import QuotaError
from engine.api.processes.server_group import ALONE, ServerGroup
from engine.api.service.tiers import KeyTier
from engine.api.tenants.key_file import Limits, TenantKey, read_key_file
from engine.api.tenants.usage_board import UsageBoard, Used, Window
from engine.errors import ConfigError, RequestError
from engine.frontend.request_output import RequestOutput

logger = logging.getLogger(__name__)

OnUsed = Callable[[str, str, int], None]
Reloaded = Callable[[Mapping[str, TenantKey]], None]


class Quotas:
    """The keys of a file, and their use."""

    def __init__(
        self,
        path: str,
        siblings: ServerGroup = ALONE,
        on_used: OnUsed = lambda key, word, number: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """ConfigError if the file is wrong. ``on_used`` is called with the name of a key, the word of a quota
        and what was used of it."""
        self._path = path
        self._on_used = on_used
        self._clock = clock
        self._board = UsageBoard(siblings)
        self._listeners: list[Reloaded] = []
        self.keys = read_key_file(path)

    def on_reload(self, listener: Reloaded) -> None:
        """Calls this with the keys, now and after each reload."""
        self._listeners.append(listener)
        listener(self.keys)

    def reload(self) -> None:
        """Reads the file again. If it is wrong, the keys stay as they are."""
        try:
            self.keys = read_key_file(self._path)
        except ConfigError as error:
            logger.error("The keys stay as they are: %s", error)
            return
        for listener in self._listeners:
            listener(self.keys)
        logger.info("Read %d keys from %s.", len(self.keys), self._path)

    def tier(self, owner: str | None) -> KeyTier | None:
        """The best service tier that a key may have; None for any."""
        key = None if owner is None else self.keys.get(owner)
        return None if key is None else key.service_tier

    def meter(self, owner: str | None) -> Meter | None:
        """What counts the requests of a key; None for one that is not in the file."""
        key = None if owner is None else self.keys.get(owner)
        if owner is None or key is None:
            return None
        slot = self._board.slot_of(owner)
        return Meter(key, self._board, slot, self._clock, partial(self._on_used, owner))


class Meter:
    """Counts for one key, and refuses what exceeds its quotas."""

    def __init__(
        self,
        key: TenantKey,
        board: UsageBoard,
        slot: int,
        clock: Callable[[], float],
        on_used: Callable[[str, int], None],
    ) -> None:
        self.key = key
        self._on_used = on_used
        self._board = board
        self._slot = slot
        self._clock = clock

    def begin(self, number: int) -> None:
        """Counts requests that are to run; QuotaError if the key may not have them."""
        now = self._clock()
        most = self.key.running_requests
        if most is not None and self._board.running(self._slot) + number > most:
            raise QuotaError(f"This key may run {most} requests at once (running_requests).", 1.0)
        for used in Used:
            wanted = number if used is Used.REQUESTS else 1
            self._check(used, wanted, now)
        self._add(Used.REQUESTS, number, now)
        self._board.run(self._slot, number)

    def end(self, number: int) -> None:
        """Counts that they have ended."""
        self._board.run(self._slot, -number)

    def prompt(self, num_tokens: int) -> None:
        """Counts a prompt that is about to be computed; QuotaError if the key may not have it."""
        now = self._clock()
        self._check(Used.PROMPT_TOKENS, num_tokens, now)
        self._add(Used.PROMPT_TOKENS, num_tokens, now)

    def came(self, output: RequestOutput, *, is_first: bool) -> None:
        """Counts new tokens of answers, and with the first of a prompt those of it that were computed."""
        now = self._clock()
        number = sum(len(answer.token_ids) for answer in output.outputs)
        computed = number
        if is_first:
            computed += max(0, len(output.prompt_token_ids) - output.num_cached_tokens)
        self._add(Used.OUTPUT_TOKENS, number, now)
        self._add(Used.COMPUTED_TOKENS, computed, now)

    def _add(self, used: Used, number: int, now: float) -> None:
        self._board.add(self._slot, used, number, now)
        self._on_used(used.word, number)

    def check_model(self, names: Sequence[str]) -> None:
        """RequestError if the key may not use the model or adapter of these names."""
        if self.key.models is not None and not any(name in self.key.models for name in names):
            raise RequestError(f"This key may use {', '.join(self.key.models) or 'no model'}.", "model")

    def _check(self, used: Used, number: int, now: float) -> None:
        for window, limits in self._limits():
            most = _limit(limits, used)
            if most is None:
                continue
            so_far = self._board.in_window(self._slot, window, used, now)
            if so_far + number > most:
                raise QuotaError(
                    f"This key may use {most} {used.word} {window.word}, and has used {so_far}.",
                    window - now % window,
                )

    def _limits(self) -> Iterator[tuple[Window, Limits]]:
        yield Window.MINUTE, self.key.per_minute
        yield Window.DAY, self.key.per_day

    def headers(self) -> dict[str, str]:
        """The headers by which clients slow down: of requests and tokens per minute, else per day, what the
        limit is, what is left, and the seconds until it is whole again."""
        now = self._clock()
        headers: dict[str, str] = {}
        for name, used in (("requests", Used.REQUESTS), ("tokens", Used.PROMPT_TOKENS)):
            for window, limits in self._limits():
                most = _limit(limits, used)
                if most is not None:
                    left = max(0, most - self._board.in_window(self._slot, window, used, now))
                    headers[f"x-ratelimit-limit-{name}"] = str(most)
                    headers[f"x-ratelimit-remaining-{name}"] = str(left)
                    headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(window - now % window)}s"
                    break
        return headers

    def usage(self) -> dict[str, object]:
        """What the key has used: since the server's start, and in each window beside its limits."""
        now = self._clock()
        told: dict[str, object] = {
            "running_requests": self._board.running(self._slot),
            "total": {used.word: self._board.total(self._slot, used) for used in Used},
        }
        for window, limits in self._limits():
            told[window.word] = {
                used.word: {
                    "used": self._board.in_window(self._slot, window, used, now),
                    "limit": _limit(limits, used),
                }
                for used in Used
            }
        return told


def _limit(limits: Limits, used: Used) -> int | None:
    limit: int | None = getattr(limits, used.word)
    return limit
