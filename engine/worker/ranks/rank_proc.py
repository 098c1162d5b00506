"""The process of a rank: receives plans from the engine core, runs its part of each, and answers. It handles
all requests in order, on one thread.

``RankProcess`` starts it. It always exits when the engine core does.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput, TokenMasks
from engine.errors import EngineDeadError, EngineError
from engine.executor import Executor, PendingOutput
from engine.process.network import keep_alive
from engine.process.process_log import begin_log
from engine.process.trim import finish_startup
from engine.worker.ranks.rank_messages import (
    RankOrder,
    RankReady,
    RankStart,
    StepPlan,
    WaveBegun,
    WorkerAnswer,
    WorkerCall,
)

logger = logging.getLogger(__name__)

PARENT_POLL_S = 0.5
"""Interval at which the parent's id is checked: a copy of the channel in a forked sibling process can hide
that the channel was closed."""
CONNECT_TIMEOUT_S = 10.0
STOP_GRACE_S = 1.0
"""Time for a running step to end before the process exits."""


class Inbox:
    """Receives messages on a separate thread: masks may arrive for a step that is already running, and the
    core can send the next plan without waiting for a step to end."""

    def __init__(self, start: RankStart, channel: Connection[Any, Any]) -> None:
        self._start = start
        self._channel = channel
        self._orders: SimpleQueue[SchedulerOutput | WorkerCall | RankOrder] = SimpleQueue()
        self._awaited_masks: deque[Future[TokenMasks]] = deque()
        threading.Thread(target=self._run, name="inbox", daemon=True).start()

    def next_order(self) -> SchedulerOutput | WorkerCall | RankOrder:
        """Wait for the next plan, call or order."""
        return self._orders.get()

    def _run(self) -> None:
        while (message := self._receive()) is not RankOrder.STOP:
            if isinstance(message, TokenMasks):
                self._awaited_masks.popleft().set_result(message)
            elif isinstance(message, StepPlan):
                self._orders.put(self._with_masks(message))
            else:
                self._orders.put(message)
        self._orders.put(RankOrder.STOP)
        # The main thread exits the process meanwhile, unless it is in a step or waits for an exited rank.
        time.sleep(STOP_GRACE_S)
        exit_process(self._start)

    def _receive(self) -> StepPlan | TokenMasks | WorkerCall | RankOrder:
        with suppress(EOFError, OSError):
            while not self._channel.poll(PARENT_POLL_S):
                if os.getppid() != self._start.parent_pid:
                    return RankOrder.STOP
            message: StepPlan | TokenMasks | WorkerCall | RankOrder = self._channel.recv()
            return message
        return RankOrder.STOP

    def _with_masks(self, step: StepPlan) -> SchedulerOutput:
        if step.has_masks:
            step.plan.masks = Future()
            self._awaited_masks.append(step.plan.masks)
        return step.plan


def main() -> None:
    """Entry point of the process."""
    start: RankStart = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it exits with the core, which may have work left
    level = start.log_level if start.rank == 0 else max(start.log_level, logging.WARNING)
    begin_log(level, f"rank {start.rank}, {os.getpid()}", shows_start=start.rank == 0)
    channel = _connect(start)
    inbox = Inbox(start, channel)
    try:
        executor = _load(start)
    except Exception as error:
        channel.send(_as_engine_error(error, start.rank))
        inbox.next_order()  # wait: the core stops all ranks, and the others must not see this one exit first
    else:
        finish_startup()
        replies = _Replies(channel)
        executor.on_wave(lambda number: replies.send(WaveBegun(number)))
        replies.send(RankReady(executor.info, executor.max_concurrent_batches))
        _serve(executor, inbox, replies, start.rank)
    exit_process(start)


def _connect(start: RankStart) -> Connection[Any, Any]:
    """The channel to the core, which is another process on this machine or on another one."""
    if isinstance(start.channel, int):
        return Connection(start.channel)
    core = start.channel
    connection = socket.create_connection((core.host, core.port), CONNECT_TIMEOUT_S)
    connection.settimeout(None)
    keep_alive(connection)
    connection.sendall(core.token + start.rank.to_bytes(4, "big"))
    return Connection(connection.detach())


def _load(start: RankStart) -> Executor:
    from engine.worker.ranks.rank_model import load  # imports torch: the inbox is listening by now

    return load(start)


def exit_process(start: RankStart) -> NoReturn:
    """Exit immediately, like the engine core: native libraries may hang in the interpreter's shutdown."""
    if start.folder is not None:
        shutil.rmtree(start.folder, ignore_errors=True)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


class _Replies:
    """Sends the rank's messages to the core, from two threads."""

    def __init__(self, channel: Connection[Any, Any]) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, message: ModelRunnerOutput | EngineError | RankReady | WaveBegun | WorkerAnswer) -> None:
        with self._sending:
            self._channel.send(message)


def _serve(executor: Executor, inbox: Inbox, replies: _Replies, rank: int) -> None:
    in_flight: deque[PendingOutput] = deque()
    with suppress(OSError):  # the core has exited
        while (order := inbox.next_order()) is not RankOrder.STOP:
            if isinstance(order, SchedulerOutput):
                in_flight.append(_submitted(executor, order))
            elif isinstance(order, WorkerCall):
                replies.send(_called(executor, order, rank))
            else:
                replies.send(_answer(in_flight.popleft(), rank))
    executor.shutdown()


def _submitted(executor: Executor, plan: SchedulerOutput) -> PendingOutput:
    try:
        return executor.submit(plan)
    except Exception as error:
        failed: Future[ModelRunnerOutput] = Future()
        failed.set_exception(error)
        return failed


def _called(executor: Executor, call: WorkerCall, rank: int) -> WorkerAnswer:
    try:
        return WorkerAnswer(executor.call_worker(call.method, *call.args))
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.error("A call of %s on rank %d failed.", call.method, rank, exc_info=error)
        return WorkerAnswer(error=error if isinstance(error, EngineError) else EngineError(repr(error)))


def _answer(step: PendingOutput, rank: int) -> ModelRunnerOutput | EngineError:
    try:
        return step.result()
    except Exception as error:
        return _as_engine_error(error, rank)


def _as_engine_error(error: Exception, rank: int) -> EngineError:
    if isinstance(error, EngineError):
        return error
    logger.error("Tensor-parallel rank %d failed.", rank, exc_info=error)
    return EngineDeadError(f"Rank {rank} of the model failed: {error!r}; see its log.")
