"""Clients of an engine core that runs in a separate process, over ZMQ sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from engine.config.engine_config import EngineConfig
from engine.core.policy import PolicyFactory
from engine.core_process.client_protocols import Delivery, EngineState, lone_engine
from engine.core_process.client_registry import FIRST_CLIENT
from engine.core_process.continued_prompts import ContinuedPrompts, as_written
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import ClientHandle, Core, CoreProcess
from engine.core_process.output_sockets import output_address, socket_address
from engine.errors import EngineDeadError, EngineGenerateError, RequestError
from engine.executor import ExecutorFactory
from engine.records.handed_over import HandedOver
from engine.records.messages import (
    ENGINE_CORE_DEAD,
    AbortRequest,
    ClientNotice,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineReady,
    Signal,
    SignalRequest,
    TurnReceipt,
    UtilityOutput,
    UtilityRequest,
)

logger = logging.getLogger(__name__)

_EXIT_ADDRESS = "inproc://core-exited"
MAX_MESSAGES_PER_TURN = 16
"""Messages that the event loop reads before it turns to other work."""
NOT_ALONE = "This server has one engine core: POST /drain without engine, which drains the server."
SEND_WITHIN_S = 0.002
"""A signal whose answer is not awaited is sent with the next message, or after this time."""


class _Promise(Protocol):
    """A future that waits for an answer, from ``concurrent.futures`` or ``asyncio``."""

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...

    def done(self) -> bool:
        """True also if it was cancelled."""


class _Calls:
    """Calls to the core that wait for their answer. Thread-safe if the promises are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, _Promise] = {}
        self._failed: EngineDeadError | None = None

    @property
    def failed(self) -> bool:
        return self._failed is not None

    def open(self, promise: _Promise) -> int:
        with self._lock:
            if self._failed is not None:
                raise self._failed
            call_id = next(self._ids)
            self._waiting[call_id] = promise
        return call_id

    def resolve(self, answer: UtilityOutput) -> None:
        with self._lock:
            promise = self._waiting.pop(answer.call_id, None)
        if promise is None or promise.done():
            return
        if answer.failure is not None:
            promise.set_exception(EngineGenerateError(answer.failure))
        else:
            promise.set_result(answer.result)

    def fail_all(self, error: EngineDeadError) -> None:
        with self._lock:
            self._failed = error
            waiting = self._waiting
            self._waiting = {}
        for promise in waiting.values():
            if not promise.done():
                promise.set_exception(error)


class _Outputs:
    """Dispatches the core's messages: answers go to the calls that wait, all others to ``deliver``."""

    def __init__(self, calls: _Calls, deliver: Callable[[Delivery], None]) -> None:
        self._calls = calls
        self._deliver = deliver
        self._decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode

    def take(self, frame: bytes) -> bool:
        """Handle one frame. False if it reports that the core has died or exited, after all calls failed."""
        if frame == ENGINE_CORE_DEAD:
            error = EngineDeadError()
            self._calls.fail_all(error)
            self._deliver(error)
            return False
        outputs = self._decode(frame)
        if outputs.utility_output is not None:
            self._calls.resolve(outputs.utility_output)
        else:
            self._deliver(outputs)
        return True


def _read_outputs(socket: zmq.Socket[bytes], outputs: _Outputs) -> None:
    """Body of the output thread; returns when the core has ended."""
    with socket:
        while outputs.take(socket.recv()):
            pass


class MPClient:
    """Client of a core in a separate process: starts or joins it, and sends to it once it is ready.

    Whatever ends the core, ENGINE_CORE_DEAD arrives on the output socket: from the core itself as its final
    message, or from the thread that waits for its process. So all learn of it in the same way.
    """

    ready: EngineReady
    """The core's answer to the handshake; set by ``await_ready``."""

    def __init__(self, core: Core) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._output_socket = self._context.socket(zmq.PULL)
        self._output_socket.linger = 0
        self._output_socket.rcvhwm = 0
        self._output_socket.bind(_EXIT_ADDRESS)
        self._input_socket = self._context.socket(zmq.PUSH)
        self._input_socket.linger = 0
        self._input_socket.sndhwm = 0
        self._send_lock = threading.Lock()
        self._calls = _Calls()
        self._reader: threading.Thread | None = None
        self._core = core
        self._exit_sent = threading.Event()
        """Event that is set once the core has ended and its exit notice has been sent."""
        core.start(_exit_notice(self._context, self._exit_sent))
        # Also run at exit and when the client is garbage collected; must not refer to ``self``.
        self._stop_core = weakref.finalize(self, core.stop)
        try:
            self._output_socket.bind(output_address(core.folder, core.client_index))
        except zmq.ZMQError:
            if os.path.isdir(core.folder):
                raise
            core.stop()  # it has ended while it was joined, and its folder with it

    def await_ready(self) -> EngineReady:
        """Wait until the core has loaded its model; if it cannot, closes this client and raises the error.
        EngineDeadError if it has ended."""
        core = self._core
        try:
            self.ready = core.handshake(self._context)
            self._input_socket.connect(socket_address(core.folder, "input"))
            if core.client_index != FIRST_CLIENT:
                self._send(EngineCoreRequestType.JOIN, ClientNotice(core.client_index))
        except BaseException:
            self.close()
            raise
        return self.ready

    @property
    def is_joined(self) -> bool:
        """Whether another process started the core, and starts the next one in its place."""
        return self._core.client_index != FIRST_CLIENT

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._core.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the core's process, negative for a signal; None while it runs, or if not known."""
        return self._core.exit_code

    @property
    def folder(self) -> str:
        """Private folder of the sockets; removed when the core ends."""
        return self._core.folder

    @property
    def dead(self) -> bool:
        """Whether the core has ended or has announced its end."""
        return self._core.exited or self._calls.failed

    def ask_to_end(self) -> None:
        """If this client started the core, let it end; that is reported like any other end."""
        self._core.ask_to_end()

    def add_request(self, request: EngineCoreRequest) -> None:
        request = msgspec.structs.replace(request, client_index=self._core.client_index)
        self._send(EngineCoreRequestType.ADD, as_written(request))

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        if request_ids:
            self._send(EngineCoreRequestType.ABORT, AbortRequest(request_ids, stopped))

    def _send(self, kind: EngineCoreRequestType, message: object) -> None:
        self.send_raw(kind.value, msgspec.msgpack.encode(message))

    def send_raw(self, kind: bytes, payload: bytes) -> None:
        """Send one encoded message: a type byte and its msgpack."""
        if self.dead:
            raise EngineDeadError
        with self._send_lock:
            self._input_socket.send_multipart([kind, payload])

    def _send_utility(self, promise: _Promise, method: str, args: Sequence[object]) -> None:
        call_id = self._calls.open(promise)
        request = UtilityRequest(call_id, method, list(args), self._core.client_index)
        self._send(EngineCoreRequestType.UTILITY, request)

    def _send_signal(self, promise: _Promise, signal: Signal) -> None:
        call_id = self._calls.open(promise)
        self._send(EngineCoreRequestType.SIGNAL, SignalRequest(call_id, signal, self._core.client_index))

    def _start_reader(self, deliver: Callable[[Delivery], None]) -> None:
        self._reader = threading.Thread(
            target=_read_outputs,
            args=(self._output_socket, _Outputs(self._calls, deliver)),
            name="engine-outputs",
            daemon=True,
        )
        self._reader.start()

    def close(self) -> None:
        """Stop the core if this client started it, and wait until it has exited. May be called again."""
        self._stop_core()
        self._exit_sent.wait()  # a context must not end while another thread opens a socket
        if self._reader is not None:
            self._reader.join()
        self._output_socket.close()
        with self._send_lock:
            self._input_socket.close()
        self._context.term()


def _exit_notice(context: zmq.Context[zmq.Socket[bytes]], sent: threading.Event) -> Callable[[], None]:
    def send() -> None:
        try:
            with contextlib.suppress(zmq.ZMQError), context.socket(zmq.PUSH) as socket:
                socket.connect(_EXIT_ADDRESS)
                # Does not block: the client may just have closed its end.
                socket.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)
        finally:
            sent.set()

    return send


class SyncMPClient(MPClient):
    """The client of a synchronous caller: outputs go into a queue."""

    def __init__(
        self, config: EngineConfig, executor_factory: ExecutorFactory, policy_factory: PolicyFactory
    ) -> None:
        super().__init__(CoreProcess(CoreSpec(config, executor_factory, policy_factory)))
        self._deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()

    def await_ready(self) -> EngineReady:
        ready = super().await_ready()
        self._start_reader(self._deliveries.put)
        return ready

    def get_output(self) -> EngineCoreOutputs:
        delivery = self._deliveries.get()
        if isinstance(delivery, EngineDeadError):
            self._deliveries.put(delivery)  # later calls raise it, too
            raise delivery
        return delivery

    def call_utility(self, method: str, *args: object) -> Any:
        return self.send_utility(method, *args).result()

    def send_utility(self, method: str, *args: object) -> Future[Any]:
        """Call a utility without waiting for its answer."""
        future: Future[Any] = Future()
        self._send_utility(future, method, args)
        return future

    def send_signal(self, signal: Signal) -> Future[Any]:
        """Report a tool-call gap or a finished job, without waiting for the answer."""
        future: Future[Any] = Future()
        self._send_signal(future, signal)
        return future


class AsyncMPClient(MPClient):
    """The client of an event loop, which reads the outputs itself, without a thread for them."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._continued = ContinuedPrompts()
        self._operating = asyncio.Lock()
        self._unsent: list[bytes] = []
        """Frames of messages that are sent together: waking the core costs more than any one of them."""
        self._send_scheduled = self._delayed_send_scheduled = False

    def attach(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]) -> None:
        """Call ``deliver`` on this loop from now on; earlier outputs are still in the socket."""
        self._loop = loop
        self._outputs = _Outputs(self._calls, partial(self._hand_on, deliver))
        loop.add_reader(self._output_socket.fileno(), self._read)
        loop.call_soon(self._read_on)

    def _read(self) -> None:
        # The descriptor is edge-triggered: it reports new messages once. So all are read here, or the loop is
        # asked to call this method again.
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                frame = self._output_socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._outputs.take(frame):
                self._detach()
            if self._output_socket.closed:
                return
        assert self._loop is not None
        self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._output_socket.closed:
            self._read()

    def _detach(self) -> None:
        if self._loop is not None and not self._output_socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._output_socket.fileno())
            self._output_socket.close()

    def _hand_on(self, deliver: Callable[[Delivery], None], delivery: Delivery) -> None:
        """Deliver the core's messages, except its requests for whole prompts, which are answered here."""
        if isinstance(delivery, EngineCoreOutputs):
            if delivery.wanted_whole:
                requests, to_abort = self._continued.take_wanted(delivery.wanted_whole)
                for request in requests:
                    super().add_request(request)
                super().abort_requests(to_abort)
                return
            self._continued.answered(delivery.outputs)
        deliver(delivery)

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(self._continued.to_send(request))

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self.add_request(request)

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        self._continued.aborted(request_ids)
        super().abort_requests(request_ids, stopped=stopped)

    async def call_utility(self, method: str, *args: object) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._send_utility(future, method, args)
        return await future

    async def signal(self, signal: Signal) -> TurnReceipt | None:
        """Send a signal; returns the core's decision about the turn, if any, without waiting for a step."""
        future = asyncio.get_running_loop().create_future()
        self._send_signal(future, signal)
        return msgspec.convert(await future, TurnReceipt | None)

    def operating(self) -> contextlib.AbstractAsyncContextManager[None]:
        """A lock that one operator at a time holds."""
        return self._operating

    async def engine_states(self) -> list[EngineState]:
        return [lone_engine(self.pid, await self.call_utility("statistics"))]

    def drain(self, engine: int, deadline_s: float) -> asyncio.Task[HandedOver | None]:
        """Raise RequestError: there is no other core to take its requests."""
        raise RequestError(NOT_ALONE, "engine")

    async def end_drain(self, engine: int) -> None:
        """Raise RequestError: it cannot be drained."""
        raise RequestError(NOT_ALONE, "engine")

    def tell(self, signal: Signal) -> None:
        """Send a signal that is not answered."""
        message = msgspec.msgpack.encode(SignalRequest(None, signal, self._core.client_index))
        # With several clients another one may send for the same job: this signal must not be overtaken.
        if self._loop is None or self._core.client_index != FIRST_CLIENT:
            self.send_raw(EngineCoreRequestType.SIGNAL.value, message)
            return
        self._put(EngineCoreRequestType.SIGNAL.value, message)
        if not self._delayed_send_scheduled:
            self._delayed_send_scheduled = True
            self._loop.call_later(SEND_WITHIN_S, self._send_delayed)

    def send_raw(self, kind: bytes, payload: bytes) -> None:
        """Send all messages of one iteration of the event loop together, at its end."""
        if self._loop is None:
            super().send_raw(kind, payload)
            return
        self._put(kind, payload)
        if not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_soon(self._send_unsent)

    def _put(self, kind: bytes, payload: bytes) -> None:
        if self.dead:
            raise EngineDeadError
        self._unsent += (kind, payload)

    def _send_delayed(self) -> None:
        self._delayed_send_scheduled = False
        self._send_unsent()

    def _send_unsent(self) -> None:
        self._send_scheduled = False
        frames = self._unsent
        self._unsent = []
        if frames and not self.dead:
            with self._send_lock:
                self._input_socket.send_multipart(frames)

    def close(self) -> None:
        self._stop_core()
        if self._loop is not None and not self._output_socket.closed:
            error = EngineDeadError("The engine was shut down.")
            self._calls.fail_all(error)
        self._detach()
        super().close()


class CoreSupervisor(MPClient):
    """Owns a core that API servers in other processes use; sends no requests itself."""

    def __init__(self, core: Core, on_death: Callable[[], None]) -> None:
        """``on_death`` is called on a separate thread, but not after ``close``."""
        super().__init__(core)
        self._indexes = itertools.count(FIRST_CLIENT + 1)
        self._closing = False

        def deliver(delivery: Delivery) -> None:
            if isinstance(delivery, EngineDeadError) and not self._closing:
                on_death()

        self.await_ready()
        self._start_reader(deliver)

    def add_client(self) -> ClientHandle:
        """Create a handle with which one more API server process joins the core."""
        return ClientHandle(self.folder, self.pid, self.ready, next(self._indexes))

    def remove_client(self, handle: ClientHandle) -> None:
        """End the requests of a process that had this handle and has exited."""
        with contextlib.suppress(EngineDeadError):
            self._send(EngineCoreRequestType.LEAVE, ClientNotice(handle.client_index))

    def close(self) -> None:
        self._closing = True
        super().close()
