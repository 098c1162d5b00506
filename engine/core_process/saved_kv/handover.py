"""Hands over what pins hold, where a core is drained or stops: whoever gets a job's next turn finds its KV.

Each pin's blocks and state go to the folder that servers share, then a record of its turn. A pin cannot lose
blocks while they are copied, as the core's lock is held; between some blocks and the next it can, and then
gets no record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.clock import Clock
from engine.config.engine_config import EngineConfig
from engine.config.kv_transfer import HANDOVER_S
from engine.core.policy import Pin
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.core_part import CorePart
from engine.errors import EngineError
from engine.executor import Executor
from engine.kv_transfer.moved_turns import MovedTurns
from engine.records.handed_over import END_HANDOVER, HAND_OVER, HandedOver
from engine.records.messages import EngineCoreOutput

logger = logging.getLogger(__name__)

BLOCKS_AT_ONCE = 64
"""Blocks that are saved under the lock: 128 MiB of an 8B model."""


class Handover(CorePart):
    """Thread-safe."""

    def __init__(
        self,
        folder: Path,
        scheduler: Callable[[], Scheduler | TracedScheduler],
        executor: Executor,
        clock: Clock,
        lock: threading.Condition,
        block_size: int,
    ) -> None:
        """``folder``: of the first rank's saved KV."""
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._lock = lock
        self._block_size = block_size
        self._goes_on = False
        """Whether turns that end are saved at once."""
        self.loaded(folder)

    def loaded(self, saved: Path, requests: Iterable[Request] = ()) -> None:
        self._turns = MovedTurns(saved.parent)
        self._saved: dict[int, int] = {}
        """For each pin that is saved, the blocks of its tokens that it had then."""

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        return {HAND_OVER: self.hand_over, END_HANDOVER: self.end}

    def answered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Save what turns have left that end while the core is left by its jobs, before their clients know:
        the next turn may go elsewhere at once."""
        if self._goes_on and any(output.finished for output in outputs):
            self._save_all(HANDOVER_S)

    def stopping(self) -> None:
        self._save_all(HANDOVER_S)

    def hand_over(self, timeout_s: float) -> HandedOver:
        """Save what all pins hold, and until ``end`` what later turns leave; pins stay as they are."""
        with self._lock:
            self._goes_on = True
        self._turns.delete_old()
        return self._save_all(timeout_s)

    def end(self) -> None:
        """The jobs stay: save no more."""
        with self._lock:
            self._goes_on = False

    def _save_all(self, timeout_s: float) -> HandedOver:
        """Save what pins hold, those that are due last first."""
        done = HandedOver()
        end = time.monotonic() + timeout_s
        with self._lock:
            pins = sorted(self._scheduler().policy.pins(), key=lambda pin: pin.deadline_s, reverse=True)
            held = {pin.pin_id for pin in pins}
            self._saved = {pin_id: size for pin_id, size in self._saved.items() if pin_id in held}
        for index, pin in enumerate(pins):
            if time.monotonic() > end or not self._save(pin, done):
                done.left += len(pins) - index
                logger.warning("The KV of %d paused turns is not handed over.", done.left)
                break
        return done

    def _save(self, pin: Pin, done: HandedOver) -> bool:
        """Save one pin, unless it ends meanwhile; False if the folder takes no more."""
        size = pin.num_prefix_blocks
        try:
            self._save_blocks(pin, size)
            with self._lock:
                if not self._holds(pin, size):
                    return True
                # Also if its blocks had been saved before: the tools that run may have become known.
                turn = self._scheduler().policy.moved_turn(pin, self._clock.now())
                num_shared = size if turn is None else min(size, turn.num_blocks)
                self._turns.write(pin.block_hashes, size, num_shared, turn)
                self._saved[pin.pin_id] = size
        except (OSError, EngineError) as error:
            logger.warning("KV could not be handed over: %s", error)
            return False
        done.turns += 1
        done.tokens += size * self._block_size
        return True

    def _save_blocks(self, pin: Pin, size: int) -> None:
        """Save what a pin of this size holds, some blocks at a time: steps go on in between."""
        with self._lock:
            if not self._holds(pin, size) or self._saved.get(pin.pin_id) == size:
                return
            held = self._scheduler().kv.pinned
            named = list(held.named_blocks_of(pin.pin_id, pin.held_hashes).items())
        for start in range(0, len(named), BLOCKS_AT_ONCE):
            with self._lock:
                if not self._holds(pin, size):
                    return
                names, block_ids = zip(*named[start : start + BLOCKS_AT_ONCE], strict=True)
                self._executor.call_worker("save_kv", names, block_ids)

    def _holds(self, pin: Pin, size: int) -> bool:
        """Whether the pin has not ended, and was not cut."""
        return 0 < pin.num_prefix_blocks == size and pin.pin_id in self._scheduler().kv.pinned


def open_handover(
    config: EngineConfig,
    executor: Executor,
    scheduler: Callable[[], Scheduler | TracedScheduler],
    clock: Clock,
    lock: threading.Condition,
) -> Handover | None:
    """What hands over pins; None where no folder takes their KV."""
    folder = executor.info.saved_kv
    if config.kv_transfer is None or not config.kv_transfer.hands_over or folder is None:
        return None
    return Handover(folder, scheduler, executor, clock, lock, config.cache.block_size)
