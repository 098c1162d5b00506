"""Runs the model in several rank processes: sends them plans and merges their outputs. Needs no torch.

No rank runs in the engine core's process, so the core can report when one dies.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.core.outputs import NO_MASKS, ModelRunnerOutput, SchedulerOutput, TokenMasks
from engine.errors import EngineDeadError, EngineError
from engine.executor import ModelInfo, PendingOutput
from engine.process.private_folder import make_private_folder, remove_private_folder
from engine.worker.ranks.rank_messages import (
    RankOrder,
    RankReady,
    StepPlan,
    WaveBegun,
    WorkerAnswer,
    WorkerCall,
    rank_places,
)
from engine.worker.ranks.rank_process import RankLink, RankProcess
from engine.worker.ranks.report_merger import ReportMerger

_STOP = pickle.dumps(RankOrder.STOP)
_SEND_OUTPUT = pickle.dumps(RankOrder.SEND_OUTPUT)
_MASKS_ARE_FILLED = pickle.dumps(NO_MASKS)


@dataclass(frozen=True, slots=True)
class _Step:
    """A PendingOutput. It requests the ranks' outputs only when ``result`` is called, so that all ranks do
    their work, including waiting for outputs, in the same order."""

    ranks: list[RankLink]
    output: Future[ModelRunnerOutput] = field(default_factory=Future)

    def result(self) -> ModelRunnerOutput:
        for rank in self.ranks:
            rank.send(_SEND_OUTPUT)
        return self.output.result()


class RankExecutor:
    """An Executor over ranks that have been started."""

    def __init__(self, ranks: Sequence[RankLink]) -> None:
        """Wait until all ranks are ready. If one could not start, stop the others and raise its failure."""
        self._ranks = list(ranks)
        self._changing = threading.Lock()
        """Guards the pending steps, and the state that says whether there can be any."""
        self._pending: deque[_Step] = deque()
        self._failure: EngineError | None = None
        self._told: Callable[[EngineError], None] | None = None
        self._on_wave: Callable[[int], None] = lambda number: None
        self._stopped = False
        self._merger = ReportMerger(len(ranks))
        self._calls: deque[Future[Any]] = deque()
        self._answers: list[deque[WorkerAnswer]] = [deque() for _ in self._ranks]
        """Each rank's answers to calls that not all ranks have answered yet."""
        self._outputs: list[deque[ModelRunnerOutput]] = [deque() for _ in self._ranks]
        """Each rank's outputs of steps that not all ranks have finished yet."""
        try:
            self._ready = self._await_ready()
        except BaseException:
            self._stop_ranks()
            raise
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def info(self) -> ModelInfo:
        return self._ready.info

    @property
    def max_concurrent_batches(self) -> int:
        return self._ready.max_concurrent_batches

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        with self._changing:
            self._told = told
            failure = self._failure
        if failure is not None:
            told(failure)

    def on_wave(self, told: Callable[[int], None]) -> None:
        self._on_wave = told

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        message = pickle.dumps(StepPlan(replace(plan, masks=None), plan.masks is not None))
        step = _Step(self._ranks)
        with self._changing:
            if self._failure is not None:
                raise self._failure
            self._pending.append(step)
        for rank in self._ranks:
            rank.send(message)
        if plan.masks is not None:
            plan.masks.add_done_callback(self._send_masks)
        return step

    def call_worker(self, method: str, *args: Any) -> Any:
        message = pickle.dumps(WorkerCall(method, args))
        answer = Future[Any]()
        with self._changing:  # all ranks get calls in the same order
            if self._failure is not None:
                raise self._failure
            self._calls.append(answer)
            for rank in self._ranks:
                rank.send(message)
        return answer.result()

    def shutdown(self) -> None:
        with self._changing:
            if self._stopped:
                return
            self._stopped = True
        self._stop_ranks()
        self._listener.join()

    def _send_masks(self, masks: Future[TokenMasks]) -> None:
        """Send masks, on the thread that has filled them. If the core has canceled them because it closes,
        nothing waits for the step, and its ranks are about to exit."""
        if masks.cancelled():
            return
        error = masks.exception()
        if error is None:
            first, *others = self._ranks
            first.send(pickle.dumps(masks.result()))
            for rank in others:
                rank.send(_MASKS_ARE_FILLED)
        else:
            self._fail(EngineDeadError(f"The masks of a step could not be made: {error!r}."))

    def _await_ready(self) -> RankReady:
        """Wait until all ranks are ready, and return the first one's message; all have the same number of
        blocks. Raises the failure of a rank that could not start."""
        ready: dict[int, RankReady] = {}
        while len(ready) < len(self._ranks):
            for rank in _with_messages([rank for rank in self._ranks if rank.rank not in ready]):
                message = rank.receive()
                if not isinstance(message, RankReady):
                    raise _as_failure(message, rank)
                ready[rank.rank] = message
        return ready[0]

    def _listen(self) -> None:
        """Receive messages until all ranks have exited."""
        present = list(self._ranks)
        while present:
            for rank in _with_messages(present):
                message = rank.receive()
                if isinstance(message, ModelRunnerOutput):
                    self._take(rank, message)
                    continue
                if isinstance(message, WorkerAnswer):
                    self._take_answer(rank, message)
                    continue
                if isinstance(message, WaveBegun):
                    self._on_wave(message.number)
                    continue
                if message is None:
                    present.remove(rank)
                if not self._stopped:
                    self._fail(_as_failure(message, rank))

    def _take(self, rank: RankLink, output: ModelRunnerOutput) -> None:
        """Collect outputs. A step has ended only when it has ended on every rank, as its blocks are in use
        until then."""
        self._outputs[rank.rank].append(output)
        if not all(self._outputs):
            return
        merged = self._merger.merge([outputs.popleft() for outputs in self._outputs])
        with self._changing:
            step = self._pending.popleft() if self._pending else None
        if step is not None:
            step.output.set_result(merged)

    def _take_answer(self, rank: RankLink, answer: WorkerAnswer) -> None:
        """Collect answers to a call, which has ended when all ranks have answered."""
        self._answers[rank.rank].append(answer)
        if not all(self._answers):
            return
        answers = [answers.popleft() for answers in self._answers]
        with self._changing:
            call = self._calls.popleft() if self._calls else None
        if call is None:
            return
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            call.set_exception(errors[0])
        else:
            call.set_result(answers[0].result)

    def _fail(self, failure: EngineError) -> None:
        with self._changing:
            if self._failure is not None:
                return
            self._failure = failure
            steps = list(self._pending)
            told = self._told
            calls = list(self._calls)
            self._pending.clear()
            self._calls.clear()
        for waiting in (*(step.output for step in steps), *calls):
            waiting.set_exception(failure)
        if told is not None:
            told(failure)

    def _stop_ranks(self) -> None:
        for rank in self._ranks:
            rank.send(_STOP)
        for rank in self._ranks:
            rank.wait()
        self._stopped_all()

    def _stopped_all(self) -> None:
        """Clean up after all ranks have exited."""


class MultiprocExecutor(RankExecutor):
    """An Executor over rank processes on this machine; its own factory."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = make_private_folder("engine-ranks-")
        places = rank_places(config, f"file://{self._folder}/meeting-point")
        super().__init__([RankProcess(config, place, self._folder) for place in places])

    def _stopped_all(self) -> None:
        remove_private_folder(self._folder)


def _with_messages(ranks: list[RankLink]) -> list[RankLink]:
    """Wait until at least one of ``ranks`` has sent a message or has exited, and return those."""
    ready = wait([rank.channel for rank in ranks])
    return [rank for rank in ranks if rank.channel in ready]


def _as_failure(message: Any, rank: RankLink) -> EngineError:
    return message if isinstance(message, EngineError) else rank.death()
