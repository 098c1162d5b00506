"""How a front end talks to an engine core: in its own process, or over sockets to one beside it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core.policy import PolicyFactory
from engine.core_process.client_registry import FIRST_CLIENT
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import ClientHandle, Core, CoreProcess
from engine.core_process.output_sockets import output_address, socket_address
from engine.errors import EngineDeadError, EngineGenerateError
from engine.executor import ExecutorFactory
from engine.messages import (
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
from engine.tokenization.prompt_encoder import EncodedTokens

logger = logging.getLogger(__name__)

Delivery = EngineCoreOutputs | EngineDeadError
_DEATH_NOTE = "inproc://core-exited"
MAX_MESSAGES_PER_TURN = 16
"""Read by an event loop before it looks at anything else."""
TELL_WITHIN_S = 0.002
"""What is told without being waited for leaves with the next message, or after this time."""


def as_written(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request to be written down, which takes as long as reading it: of tokens that a tokenizer has made
    for us most have been written for turns before."""
    tokens = request.prompt_token_ids
    if not isinstance(tokens, EncodedTokens):
        return request
    written: Any = msgspec.Raw(tokens.as_msgpack)
    return msgspec.structs.replace(request, prompt_token_ids=written)


class SyncCoreClient(Protocol):
    """A core as the synchronous ``LLMEngine`` needs it; its callers wait. An event loop has AsyncMPClient."""

    def await_ready(self) -> EngineReady:
        """Wait until the core has loaded its model; raises why it cannot."""

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        """``stopped``: they met a stop string, which ends a turn like EOS does."""

    def get_output(self) -> EngineCoreOutputs:
        """The next message of the core; waits for it. EngineDeadError if there will be none."""

    def call_utility(self, method: str, *args: object) -> Any:
        """A utility of the core by name; EngineGenerateError with its text if it fails."""

    def close(self) -> None: ...


class _Promise(Protocol):
    """What waits for an answer: a future of a thread or of an event loop."""

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...

    def done(self) -> bool:
        """Also if nobody waits any more."""


class _Calls:
    """Calls to the core that wait for their answer. Thread safe as far as the promises are."""

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
            waiting, self._waiting = self._waiting, {}
        for promise in waiting.values():
            if not promise.done():
                promise.set_exception(error)


class _Outputs:
    """What the core says, frame by frame: answers go to the calls that wait, the rest is delivered."""

    def __init__(self, calls: _Calls, deliver: Callable[[Delivery], None]) -> None:
        self._calls = calls
        self._deliver = deliver
        self._decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode

    def take(self, frame: bytes) -> bool:
        """False, once everyone has been told, if the core has died or exited."""
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
    """Body of the output thread; ends with the core."""
    with socket:
        while outputs.take(socket.recv()):
            pass


class MPClient:
    """A core in a process of its own: starts or joins it, sends to it once it is ready.

    The core's end, however it comes, arrives as ENGINE_CORE_DEAD on the socket of its outputs: sent by the
    core's own last breath or by the thread that waits for the process. So there is one way to learn of it.
    """

    ready: EngineReady
    """What ``await_ready`` has brought."""

    def __init__(self, core: Core) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._output_socket = self._context.socket(zmq.PULL)
        self._output_socket.linger = 0
        self._output_socket.rcvhwm = 0
        self._output_socket.bind(_DEATH_NOTE)
        self._input_socket = self._context.socket(zmq.PUSH)
        self._input_socket.linger = 0
        self._input_socket.sndhwm = 0
        self._send_lock = threading.Lock()
        self._calls = _Calls()
        self._reader: threading.Thread | None = None
        self._core = core
        self._noted = threading.Event()
        """The core has ended, and its death note has been sent."""
        core.start(_exit_notice(self._context, self._noted))
        # Also run at exit and when the client is garbage collected; must not refer to ``self``.
        self._stop_core = weakref.finalize(self, core.stop)
        self._output_socket.bind(output_address(core.folder, core.client_index))

    def await_ready(self) -> EngineReady:
        """Wait until the core has loaded its model; closes this client and raises why if it cannot."""
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
    def pid(self) -> int:
        """Process id of the core."""
        return self._core.pid

    @property
    def exit_code(self) -> int | None:
        """Of the core's process, negative for a signal; None while it runs, or where that is not known."""
        return self._core.exit_code

    @property
    def folder(self) -> str:
        """Private folder of the sockets; gone with the core."""
        return self._core.folder

    @property
    def dead(self) -> bool:
        """Whether the core has ended, or has said that it is about to."""
        return self._core.exited or self._calls.failed

    def add_request(self, request: EngineCoreRequest) -> None:
        request = msgspec.structs.replace(request, client_index=self._core.client_index)
        self._send(EngineCoreRequestType.ADD, as_written(request))

    def abort_requests(self, request_ids: list[str], *, stopped: bool = False) -> None:
        if request_ids:
            self._send(EngineCoreRequestType.ABORT, AbortRequest(request_ids, stopped))

    def _send(self, kind: EngineCoreRequestType, message: object) -> None:
        self.send_raw(kind.value, msgspec.msgpack.encode(message))

    def send_raw(self, kind: bytes, payload: bytes) -> None:
        """One message as it travels: a type byte and its msgpack."""
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
        """Stop the core, if it is ours, and wait until it has gone. Repeatable."""
        self._stop_core()
        self._noted.wait()  # a context must not end while another thread asks it for a socket
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
                socket.connect(_DEATH_NOTE)
                # Where the client has just closed its end there is none to wait for.
                socket.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)
        finally:
            sent.set()

    return send


class SyncMPClient(MPClient):
    """For a caller that waits: outputs go into a queue."""

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
            self._deliveries.put(delivery)  # for whoever asks next
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
        """Tell the core of a tool gap or a finished job, without waiting for its answer."""
        future: Future[Any] = Future()
        self._send_signal(future, signal)
        return future


class AsyncMPClient(MPClient):
    """For an event loop, which reads the outputs itself: no other thread takes its turn for that."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._unsent: list[bytes] = []
        """Frames of messages that leave together: each time the core is woken costs more than any of them."""
        self._leave_soon = self._leave_later = False

    def attach(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]) -> None:
        """Call ``deliver`` on this loop from now on; what came before is waiting in the socket."""
        self._loop = loop
        self._outputs = _Outputs(self._calls, deliver)
        loop.add_reader(self._output_socket.fileno(), self._read)
        loop.call_soon(self._read_on)

    def _read(self) -> None:
        # The descriptor tells of new messages once, not until they are read: all are taken, or it is as if it
        # had told again.
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

    async def call_utility(self, method: str, *args: object) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._send_utility(future, method, args)
        return await future

    async def signal(self, signal: Signal) -> TurnReceipt | None:
        """The core's decision about the turn, if it has one; needs no step to be answered."""
        future = asyncio.get_running_loop().create_future()
        self._send_signal(future, signal)
        return msgspec.convert(await future, TurnReceipt | None)

    def tell(self, signal: Signal) -> None:
        """A signal that is not answered."""
        message = msgspec.msgpack.encode(SignalRequest(None, signal, self._core.client_index))
        # Of one client of several another may speak, too: what they tell must not be overtaken.
        if self._loop is None or self._core.client_index != FIRST_CLIENT:
            self.send_raw(EngineCoreRequestType.SIGNAL.value, message)
            return
        self._put(EngineCoreRequestType.SIGNAL.value, message)
        if not self._leave_later:
            self._leave_later = True
            self._loop.call_later(TELL_WITHIN_S, self._send_told)

    def send_raw(self, kind: bytes, payload: bytes) -> None:
        """All messages of one turn of the loop leave at its end."""
        if self._loop is None:
            super().send_raw(kind, payload)
            return
        self._put(kind, payload)
        if not self._leave_soon:
            self._leave_soon = True
            self._loop.call_soon(self._send_unsent)

    def _put(self, kind: bytes, payload: bytes) -> None:
        if self.dead:
            raise EngineDeadError
        self._unsent += (kind, payload)

    def _send_told(self) -> None:
        self._leave_later = False
        self._send_unsent()

    def _send_unsent(self) -> None:
        self._leave_soon = False
        frames, self._unsent = self._unsent, []
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
    """Holds a core for front ends in other processes; makes no requests of its own."""

    def __init__(self, core: CoreProcess, on_death: Callable[[], None]) -> None:
        """``on_death`` is called on a thread of its own; not for an end by ``close``."""
        super().__init__(core)
        self._indexes = itertools.count(FIRST_CLIENT + 1)
        self._closing = False

        def deliver(delivery: Delivery) -> None:
            if isinstance(delivery, EngineDeadError) and not self._closing:
                on_death()

        self.await_ready()
        self._start_reader(deliver)

    def seat(self) -> ClientHandle:
        """A place at the core for one more front end."""
        return ClientHandle(self.folder, self.pid, self.ready, next(self._indexes))

    def dismiss(self, seat: ClientHandle) -> None:
        """The front end that had this place has gone: its requests are ended."""
        with contextlib.suppress(EngineDeadError):
            self._send(EngineCoreRequestType.LEAVE, ClientNotice(seat.client_index))

    def close(self) -> None:
        self._closing = True
        super().close()
