"""A group of engine cores as one client: each request goes to the core that the router chooses.

Messages about a request go to its core. Messages about a job go to every core, since a job may have moved.
The death of a core ends its own requests; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from engine.clock import Clock, MonotonicClock
from engine.core.core_outputs import failed_output
from engine.core_group.drains import Drains
from engine.core_group.ledger import RequestLedger
from engine.core_group.load_board import Drain, LoadBoard
from engine.core_group.merged_answers import merge_answers
from engine.core_group.operator_records import OperatorRecords
from engine.core_process.client_protocols import Delivery, EngineState
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.launcher import Core
from engine.errors import EngineDeadError, EngineGenerateError, RequestError
from engine.records.handed_over import HandedOver
from engine.records.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    JobFinished,
    Signal,
    ToolGapStarted,
    TurnReceipt,
)
from engine.routing import EngineLoad, RoutedTurn, Router

logger = logging.getLogger(__name__)

CORE_DIED = "The engine core that ran this request has died; send the request again."
_WORDS: dict[Drain, Literal["up", "draining", "drained"]] = {
    Drain.NONE: "up",
    Drain.LEAVING: "draining",
    Drain.CLOSED: "draining",
    Drain.DONE: "drained",
}
NO_CORE = "No engine core takes requests at the moment; try again later."


CoreDied = Callable[[int, AsyncMPClient], bool]


@dataclass(slots=True)
class _Engine:
    """A place in the group, and its core."""

    index: int
    client: AsyncMPClient | None
    """None while there is no core."""


class CoreGroupClient:
    """An ``AsyncCoreClient`` over several cores."""

    ready: EngineReady

    def __init__(
        self,
        cores: Sequence[Core | None],
        router: Router,
        board: LoadBoard | None = None,
        *,
        on_core_died: CoreDied = lambda index, client: False,
        on_attached: Callable[[CoreGroupClient, asyncio.AbstractEventLoop], None] | None = None,
        ready: EngineReady | None = None,
        clock: Clock | None = None,
        records: OperatorRecords | None = None,
    ) -> None:
        """Start or join all cores; None is one that comes later (``replace``). ``on_core_died`` is called on
        the event loop with the number of a core that has died and its client, which it must close; it returns
        whether another core will come in its place. ``on_attached`` is called when the group has its loop.
        ``ready``: the cores' answer, if it is known although none may be up."""
        self._engines = [
            _Engine(index, None if core is None else AsyncMPClient(core)) for index, core in enumerate(cores)
        ]
        self._router = router
        self._board = board or LoadBoard(len(cores))
        self._on_core_died = on_core_died
        self._on_attached = on_attached
        self._known = ready
        self._clock = clock or MonotonicClock()
        self._ledger = RequestLedger()
        self._drains = Drains(self._board, lambda index: self._engines[index].client)
        self._awaited = {engine.index for engine in self._engines if engine.client is None}
        """Places that wait for a core."""
        self._records = records or OperatorRecords()
        self._joining: set[asyncio.Task[None]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Delivery], None] = lambda delivery: None
        self._closed = False

    # ---- life ----

    def await_ready(self) -> EngineReady:
        """Wait until every core has loaded its model; the group reports the smallest of their KV pools.

        A core that was joined and has ended since is awaited again.
        """
        try:
            answers = [ready for engine in self._engines if (ready := self._ready_of(engine)) is not None]
            answers = answers or ([] if self._known is None else [self._known])
            if not answers:
                raise EngineDeadError("All engine cores have ended.")
        except BaseException:
            self.close()
            raise
        num_blocks = min(answer.num_gpu_blocks for answer in answers)
        self.ready = msgspec.structs.replace(answers[0], num_gpu_blocks=num_blocks)
        return self.ready

    def _ready_of(self, engine: _Engine) -> EngineReady | None:
        if engine.client is None:
            return None
        try:
            return engine.client.await_ready()
        except EngineDeadError:
            if not engine.client.is_joined:
                raise
            engine.client = None
            self._awaited.add(engine.index)
            return None

    def attach(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]) -> None:
        self.loop = loop
        self._deliver = deliver
        for engine in self._engines:
            self._attach(engine)
        if self._on_attached is not None:
            self._on_attached(self, loop)

    def _attach(self, engine: _Engine) -> None:
        if engine.client is not None and self.loop is not None:
            engine.client.attach(self.loop, partial(self._take, engine, engine.client))

    @property
    def pid(self) -> int:
        return next((client.pid for client in self._clients()), 0)

    @property
    def dead(self) -> bool:
        return not any(True for _ in self._clients())

    def close(self) -> None:
        self._closed = True
        for engine in self._engines:
            if engine.client is not None:
                engine.client.close()

    def clients_up(self) -> dict[int, AsyncMPClient]:
        """The clients of the cores that are up, by number."""
        engines = ((engine.index, engine.client) for engine in self._engines)
        return {index: client for index, client in engines if client is not None and not client.dead}

    def _clients(self, indexes: Collection[int] | None = None) -> Iterator[AsyncMPClient]:
        """Clients of the cores that are up; if ``indexes`` is given, only at these places."""
        for index, client in self.clients_up().items():
            if indexes is None or index in indexes:
                yield client

    # ---- requests ----

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send the requests of one prompt to one core; EngineDeadError if none takes any."""
        index, client = self._place(requests[0])
        for request in requests:
            client.add_request(request)
            self._ledger.sent(request, index)
            self._board.count_open(index, 1)

    def _place(self, request: EngineCoreRequest) -> tuple[int, AsyncMPClient]:
        job = request.job
        turn = RoutedTurn(
            request.request_id,
            request.prompt_token_ids,
            job_id=None if job is None else job.job_id,
            parent_id=None if job is None else job.parent_id,
            owner=request.owner,
            cache_salt=request.cache_salt,
        )
        loads = self._loads(turn)
        if all(load is None for load in loads):
            raise EngineDeadError(NO_CORE)
        index = self._router.place(turn, loads, self._clock.now())
        client = self._engines[index].client
        assert client is not None, "only cores that are up have a load"
        return index, client

    def _loads(self, turn: RoutedTurn) -> list[EngineLoad | None]:
        """The load of each core that takes the turn. If all are draining, all take it."""
        up = self.clients_up()
        drains = {index: self._board.drain_of(index) for index in up}
        taking = [index for index, drain in drains.items() if drain is Drain.NONE]
        leaving = [index for index, drain in drains.items() if drain is Drain.LEAVING]
        if leaving and (home := self._router.home(turn)) in leaving:
            taking.append(home)
        taking = taking or list(up)
        loads: list[EngineLoad | None] = [None] * len(self._engines)
        for index in taking:
            loads[index] = self._board.load_of(index)
        return loads

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        """End requests; their cores report the end of each."""
        for index, share in self._ledger.by_engine(request_ids).items():
            for client in self._clients((index,)):
                with suppress(EngineDeadError):  # it is dying, and its requests end with it
                    client.abort_requests(share, stopped=stopped)

    # ---- outputs ----

    def _take(self, engine: _Engine, client: AsyncMPClient, delivery: Delivery) -> None:
        if client is not engine.client:
            return  # from a core that was replaced
        if isinstance(delivery, EngineDeadError):
            self._lose(engine, client)
            return
        for output in delivery.outputs:
            self._ledger.answered(output.request_id)
            if output.finished and self._ledger.ended(output.request_id):
                self._board.count_open(engine.index, -1)
        if delivery.scheduler_stats is not None:
            self._board.report(engine.index, delivery.scheduler_stats)
        delivery.engine_index = engine.index
        self._deliver(delivery)

    def _lose(self, engine: _Engine, client: AsyncMPClient) -> None:
        """Handle the death of a core: requests that it has answered fail, the others move, and the router
        forgets it."""
        if self._closed:
            return
        engine.client = None
        lost = self._ledger.lose(engine.index)
        self._board.count_open(engine.index, -len(lost.answered) - len(lost.unanswered))
        self._board.forget(engine.index)
        self._router.lost(engine.index)
        if self._on_core_died(engine.index, client):
            self._awaited.add(engine.index)
        failed = [*lost.answered, *self._moved(lost.unanswered)]
        now = self._clock.now()
        outputs = [failed_output(request_id, CORE_DIED) for request_id in failed]
        self._deliver(EngineCoreOutputs(outputs, timestamp=now, engine_index=engine.index))
        self._end_if_none_is_left()

    def _moved(self, requests: Sequence[EngineCoreRequest]) -> Iterator[str]:
        """Send requests to other cores; yields the ids of those that none takes, as all may be dying."""
        for request in requests:
            try:
                self.add_requests([request])
            except EngineDeadError:
                yield request.request_id

    def _end_if_none_is_left(self) -> None:
        if self.dead and not self._awaited and not self._closed:
            self._deliver(EngineDeadError("All engine cores have died."))

    def replace(self, index: int, client: AsyncMPClient) -> None:
        """Put a new core in the place of one that died; on the event loop, after its ``await_ready``. It is
        up once it has the operators' changes to the others."""
        assert self.loop is not None
        engine = self._engines[index]
        client.attach(self.loop, partial(self._take, engine, client))
        joining = self.loop.create_task(self._join(engine, client))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    async def _join(self, engine: _Engine, client: AsyncMPClient) -> None:
        try:
            async with self._records.operating():
                record = None
                while record != (now := self._records.read()):  # a pause takes no lock
                    record = now
                    await client.call_utility("take_record", msgspec.to_builtins(record))
                if not client.dead:
                    self._awaited.discard(engine.index)
                    engine.client = client
                    return
        except (EngineDeadError, EngineGenerateError) as error:
            if not client.dead:
                logger.error("Engine core %d cannot get the state of the others: %s", engine.index, error)
        if not self._closed:
            self._on_core_died(engine.index, client)
            self._end_if_none_is_left()

    def give_up(self, index: int) -> None:
        """Note that no core will come in place of the one that died."""
        self._awaited.discard(index)
        self._end_if_none_is_left()

    # ---- utilities and signals ----

    async def call_utility(self, method: str, *args: object) -> Any:
        """Call a utility of every core that is up; one that dies meanwhile is left out."""
        if method == "door":  # known here: a core that does not answer must not delay it
            return self._records.read().door
        calls = [client.call_utility(method, *args) for client in self._clients()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        answer = merge_answers(method, _without_the_dead(answers), args)
        self._records.note(method, args, answer)
        return answer

    def operating(self) -> AbstractAsyncContextManager[None]:
        return self._records.operating()

    async def signal(self, signal: Signal) -> TurnReceipt | None:
        calls = [client.signal(signal) for client in self._concerned_by(signal)]
        if not calls:
            return None
        answers: list[TurnReceipt | BaseException | None]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return next((receipt for receipt in _without_the_dead(answers) if receipt is not None), None)

    def tell(self, signal: Signal) -> None:
        for client in self._concerned_by(signal):
            with suppress(EngineDeadError):
                client.tell(signal)

    # ---- operations ----

    async def engine_states(self) -> list[EngineState]:
        return [self._state_of(engine) for engine in self._engines]

    def _state_of(self, engine: _Engine) -> EngineState:
        load = self._board.load_of(engine.index)
        client = engine.client
        is_up = client is not None and not client.dead
        drain = self._board.drain_of(engine.index)
        return EngineState(
            engine=engine.index,
            state=_WORDS[drain] if is_up else "down",
            process_id=client.pid if client is not None and is_up else None,
            num_open=load.num_open,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks,
            num_pinned_blocks=load.num_pinned_blocks,
        )

    def drain(self, engine: int, deadline_s: float) -> asyncio.Task[HandedOver | None]:
        self._check(engine)
        return self._drains.begin(engine, deadline_s, hands_over=self.ready.hands_over)

    async def end_drain(self, engine: int) -> None:
        self._check(engine)
        await self._drains.end(engine, hands_over=self.ready.hands_over)

    def _check(self, engine: int) -> None:
        if not 0 <= engine < len(self._engines):
            last = len(self._engines) - 1
            raise RequestError(f"engine must be a number from 0 to {last}, got {engine}.", "engine")

    def _concerned_by(self, signal: Signal) -> Iterator[AsyncMPClient]:
        if isinstance(signal, JobFinished):
            self._router.job_ended(signal.job_id)
        if isinstance(signal, ToolGapStarted):
            index = self._ledger.engine_of(signal.request_id)
            return self._clients(() if index is None else (index,))
        return self._clients()


def _without_the_dead(answers: Sequence[Any]) -> list[Any]:
    """The answers of the live cores. Raises the first error that is not a death, or the death if there is
    nothing else."""
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
            raise answer
    alive = [answer for answer in answers if not isinstance(answer, EngineDeadError)]
    if not alive:
        raise next(iter(answers), EngineDeadError(NO_CORE))
    return alive
