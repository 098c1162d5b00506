"""The engine core's process: the main thread steps, one thread reads input, another watches the parent.

Started by ``engine.core_process.launcher``. It exits when its parent exits or its standard input is closed.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import msgspec
import zmq

from engine.clock import MonotonicClock
from engine.core.core_outputs import failed_output
from engine.core_process.client_registry import FIRST_CLIENT, ClientRegistry
from engine.core_process.core_operations import SLOW_UTILITIES
from engine.core_process.core_start import FAILED, READY, CoreSpec, CoreStart
from engine.core_process.engine_core import EngineCore
from engine.core_process.output_sockets import OutputSockets, socket_address
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.process.process_log import begin_log
from engine.process.teacher import Teacher
from engine.process.trim import finish_startup
from engine.records.messages import (
    ENGINE_CORE_DEAD,
    AbortRequest,
    ClientNotice,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineStartFailed,
    Signal,
    SignalRequest,
    UtilityOutput,
    UtilityRequest,
)

logger = logging.getLogger(__name__)

PARENT_POLL_S = 0.5
"""How often the parent's process id is checked: a copy of the pipe in a forked sibling can hide the end of
file."""
STOP_GRACE_S = 1.0
"""How long a running step may go on after the parent has exited; then the process exits anyway."""
HANDSHAKE_LINGER_MS = 60_000
"""How long a startup error waits for the parent, which may still be loading its own libraries."""


class EngineCoreProc:
    """Connects an EngineCore to its clients: all write to one socket, and each reads outputs from its own."""

    def __init__(self, core: EngineCore, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self._core = core
        self._context = context
        self._folder = folder
        self._clients = ClientRegistry()
        self._failure: BaseException | None = None
        self._output_sockets = OutputSockets(context, folder, self._clients)
        self._add_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._abort_decoder = msgspec.msgpack.Decoder(AbortRequest)
        self._utility_decoder = msgspec.msgpack.Decoder(UtilityRequest)
        self._signal_decoder = msgspec.msgpack.Decoder(SignalRequest)
        self._notice_decoder = msgspec.msgpack.Decoder(ClientNotice)
        self._input_socket = context.socket(zmq.PULL)
        self._input_socket.linger = 0
        self._input_socket.rcvhwm = 0
        self._input_socket.bind(socket_address(folder, "input"))
        self._input_thread = self._start_thread(self._read_inputs, "core-inputs")
        core.on_failure(self._fail)

    def run(self) -> None:
        """Step until asked to stop. An error ends the core: it is reported to the clients, then raised."""
        try:
            while self._core.wait_for_work():
                outputs = self._core.step()
                if outputs is not None:
                    self._output_sockets.send(outputs)
                else:
                    self._output_sockets.flush()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self._output_sockets.send_to_all(ENGINE_CORE_DEAD)
            raise
        finally:
            self._output_sockets.close()

    def _start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(target,), name=name, daemon=True)
        thread.start()
        return thread

    def _guard(self, target: Callable[[], None]) -> None:
        """If a socket thread fails, end the core: without the thread no request would ever finish."""
        try:
            target()
        except zmq.ContextTerminated:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, failure: BaseException) -> None:
        """End the loop, which then raises this error; called on any thread."""
        self._failure = failure
        self._core.request_stop()

    def _read_inputs(self) -> None:
        handlers = {
            EngineCoreRequestType.ADD.value: self._add,
            EngineCoreRequestType.ABORT.value: self._abort,
            EngineCoreRequestType.UTILITY.value: self._utility,
            EngineCoreRequestType.SIGNAL.value: self._signal,
            EngineCoreRequestType.JOIN.value: self._join,
            EngineCoreRequestType.LEAVE.value: self._leave,
        }
        with self._input_socket:
            while True:
                frames = self._input_socket.recv_multipart()
                for kind, payload in zip_longest(frames[::2], frames[1::2]):  # several may come together
                    handler = handlers.get(kind)
                    if handler is None or payload is None:
                        logger.error("Dropped a message of unknown type %r.", kind[:8])
                    else:
                        handler(payload)

    def _add(self, payload: bytes) -> None:
        try:
            request = self._add_decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._refuse(payload, error)
            return
        if not self._clients.knows(request.client_index):
            return
        before = None
        if request.continues is not None:
            before = self._core.kept_turns.take(request.continues)
            if before is None:
                wanted = EngineCoreOutputs(timestamp=self._core.now(), wanted_whole=[request.request_id])
                self._output_sockets.answer(request.client_index, wanted)
                return
        self._clients.take(request.request_id, request.client_index)
        self._output_sockets.expect(request)
        self._send(self._core.add_request(request, before))

    def _refuse(self, payload: bytes, error: msgspec.DecodeError) -> None:
        """Answer with an error if at least the request's id can be decoded."""
        request_id, client_index = _sender(payload)
        logger.error("Cannot decode request %s: %s", request_id or "of unknown id", error)
        if request_id is not None:
            output = failed_output(request_id, f"The request cannot be decoded: {error}.")
            self._output_sockets.answer(client_index, EngineCoreOutputs([output], timestamp=self._core.now()))

    def _abort(self, payload: bytes) -> None:
        try:
            message = self._abort_decoder.decode(payload)
        except msgspec.DecodeError as error:
            logger.error("Cannot decode an abort: %s", error)
            return
        self._send(self._core.abort_requests(message))

    def _utility(self, payload: bytes) -> None:
        try:
            message = self._utility_decoder.decode(payload)
        except msgspec.DecodeError as error:
            logger.error("Cannot decode a utility call: %s", error)
            return

        def answer() -> None:
            call = partial(self._core.call_utility, message.method, message.args)
            self._answer(message.client_index, message.call_id, call)

        if message.method in SLOW_UTILITIES:  # the input thread must keep reading meanwhile
            threading.Thread(target=answer, name=message.method, daemon=True).start()
        else:
            answer()

    def _signal(self, payload: bytes) -> None:
        try:
            message = self._signal_decoder.decode(payload)
        except msgspec.DecodeError as error:
            logger.error("Cannot decode a signal: %s", error)
            return
        if message.call_id is None:
            self._take(message.signal)
        else:
            self._answer(message.client_index, message.call_id, lambda: self._core.signal(message.signal))

    def _take(self, signal: Signal) -> None:
        try:
            self._core.signal(signal)
        except Exception:
            logger.exception("Handling a signal failed.")

    def _answer(self, client_index: int, call_id: int, call: Callable[[], Any]) -> None:
        try:
            # Encoded here, so that a result that cannot be encoded fails only this call.
            answer = UtilityOutput(call_id, msgspec.Raw(msgspec.msgpack.encode(call())))
        except EngineError as error:
            answer = UtilityOutput(call_id, failure=str(error))
        except Exception as error:
            logger.exception("A utility call failed.")
            answer = UtilityOutput(call_id, failure=repr(error))
        self._output_sockets.answer(client_index, EngineCoreOutputs(utility_output=answer))

    def _join(self, payload: bytes) -> None:
        notice = self._notice(payload)
        if notice is not None:
            self._clients.join(notice.client_index)
            self._core.report_again()

    def _leave(self, payload: bytes) -> None:
        notice = self._notice(payload)
        if notice is not None and notice.client_index != FIRST_CLIENT:
            left_behind = self._clients.leave(notice.client_index)
            self._output_sockets.drop(notice.client_index)
            self._send(self._core.abort_requests(AbortRequest(left_behind)))
            self._core.report_again()

    def _notice(self, payload: bytes) -> ClientNotice | None:
        try:
            return self._notice_decoder.decode(payload)
        except msgspec.DecodeError as error:
            logger.error("Cannot decode a client notice: %s", error)
            return None

    def _send(self, outputs: list[EngineCoreOutput]) -> None:
        if outputs:
            self._output_sockets.send(EngineCoreOutputs(outputs=outputs, timestamp=self._core.now()))


_CLIENT_INDEX_AT = EngineCoreRequest.__struct_fields__.index("client_index")


def _sender(payload: bytes) -> tuple[str | None, int]:
    """Id and client of a request that cannot be fully decoded."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return None, FIRST_CLIENT
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        return None, FIRST_CLIENT
    index = fields[_CLIENT_INDEX_AT] if len(fields) > _CLIENT_INDEX_AT else FIRST_CLIENT
    return fields[0], index if isinstance(index, int) else FIRST_CLIENT


class ParentWatch:
    """Ends the core when its parent has exited or closed the pipe; cleanly if the step ends in time."""

    def __init__(self, start: CoreStart) -> None:
        self._start = start
        self._core: EngineCore | None = None
        self._parent_gone = False
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    @property
    def parent_gone(self) -> bool:
        return self._parent_gone

    def attach(self, core: EngineCore) -> None:
        self._core = core

    def _run(self) -> None:
        while not self._parent_has_gone():
            pass
        self._parent_gone = True
        if self._core is not None:
            self._core.request_stop()
            # Meanwhile the main thread ends the process, unless it is in a long step.
            time.sleep(STOP_GRACE_S)
            self._core.persist()
        _leave(self._start, 0)

    def _parent_has_gone(self) -> bool:
        """Whether the parent has gone; waits for up to half a second."""
        readable, _, _ = select.select([0], [], [], PARENT_POLL_S)
        return bool(readable and not os.read(0, 1)) or os.getppid() != self._start.parent_pid


def main() -> None:
    """Entry point of the process; it exits with code 0 only if it was asked to stop."""
    gc.disable()  # until all is loaded, which leaves little garbage: saves a tenth of the startup time
    start: CoreStart = pickle.load(sys.stdin.buffer)
    begin_log(start.log_level, f"core {os.getpid()}")
    watch = ParentWatch(start)
    _leave(start, _run(start, watch))


def _leave(start: CoreStart, exit_code: int) -> NoReturn:
    """Exit without ``sys.exit``: native libraries with threads may hang in its cleanup."""
    shutil.rmtree(start.folder, ignore_errors=True)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _run(start: CoreStart, watch: ParentWatch) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    exit_code = _start_and_serve(start, watch, context)
    if not watch.parent_gone:
        context.term()  # waits until the last messages are sent, at most for their linger time
    return exit_code


def _start_and_serve(start: CoreStart, watch: ParentWatch, context: zmq.Context[zmq.Socket[bytes]]) -> int:
    with context.socket(zmq.PUSH) as handshake:
        handshake.linger = HANDSHAKE_LINGER_MS
        handshake.connect(socket_address(start.folder, "handshake"))
        core = _build(start, handshake)
        if core is None:
            return 1
        watch.attach(core)
        signal.signal(signal.SIGTERM, lambda *_: core.request_stop())
        process = EngineCoreProc(core, context, start.folder)
        handshake.send_multipart([READY, msgspec.msgpack.encode(core.ready)])
    return _serve(process, core)


def _build(start: CoreStart, handshake: zmq.Socket[bytes]) -> EngineCore | None:
    """Build the core; None if it cannot start, which has then been reported to the parent."""
    try:
        spec = _unpickled(start.spec)
        return EngineCore(spec.config, spec.executor_factory, spec.policy_factory, MonotonicClock())
    except EngineError as error:
        failure = EngineStartFailed(type(error).__name__, str(error))
    except Exception as error:
        logger.exception("The engine core failed to start.")
        failure = EngineStartFailed(
            EngineDeadError.__name__, f"The engine core failed to start: {error!r}; see its log."
        )
    handshake.send_multipart([FAILED, msgspec.msgpack.encode(failure)])
    return None


def _unpickled(spec: bytes) -> CoreSpec:
    try:
        loaded = pickle.loads(spec)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"The engine core cannot import its executor or policy factory ({error}); define it in a module "
            "that can be imported, not in the script that is being run."
        ) from error
    assert isinstance(loaded, CoreSpec)
    return loaded


def _serve(process: EngineCoreProc, core: EngineCore) -> int:
    exit_code = 0
    finish_startup()
    trainer = core.policy.trainer
    teacher = None if trainer is None else Teacher(trainer, core.utilities.take_lesson, core.signal)
    try:
        process.run()
    except EngineError as error:
        logger.error("The engine core died: %s", error)
        exit_code = 1
    except BaseException:
        logger.exception("The engine core died.")
        exit_code = 1
    if teacher is not None:
        teacher.close()
    try:
        core.close()
    except Exception:
        logger.exception("The engine core failed to stop cleanly.")
        exit_code = 1
    return exit_code
