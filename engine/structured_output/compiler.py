"""Compiles grammars on separate threads and caches them.

The library receives the model's tokens only with the first request that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from engine.core.token_grammar import TokenGrammar
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend import CompiledGrammar, GrammarBackend, TokenTable
from engine.structured_output.enforceable import enforceable
from engine.structured_output.future_cache import FutureCache, resolve, uncancellable
from engine.structured_output.thinking_budget import with_budget

MAX_REMEMBERED = 64
"""Maximum number of cached grammars: agents send the same few with every turn."""
COMPILE_THREADS = 2


class GrammarCheck(Protocol):
    """Validates a grammar before a request that needs it goes to the core."""

    def check(self, params: StructuredOutputsParams, owner: str = "") -> Future[StructuredOutputsParams]:
        """Returns the enforceable grammar: the same one, without those parts of lenient schemas that cannot
        be enforced.

        RequestError in the future if it is invalid. The future is shared and cannot be cancelled. Owners take
        turns.
        """


class GrammarCompiler:
    """Compiles parameters to grammars; a GrammarCheck for trusted authors. Thread safe."""

    def __init__(self, tokens: Callable[[], TokenTable]) -> None:
        """``tokens`` is called at most once, on another thread."""
        self._tokens = tokens
        self._lock = threading.Lock()
        self._backend: Future[GrammarBackend] | None = None
        self._compiled: FutureCache[CompiledGrammar] = FutureCache(
            MAX_REMEMBERED, COMPILE_THREADS, "grammar-compiler"
        )
        self._checked: FutureCache[StructuredOutputsParams] = FutureCache(
            MAX_REMEMBERED, COMPILE_THREADS, "grammar-check"
        )

    def compile(self, params: StructuredOutputsParams, owner: str = "") -> Future[CompiledGrammar]:
        """Returns the grammar, at once if it is cached; RequestError in the future if it is invalid."""
        return self._compiled.get(params, lambda: self.backend().compile(params), owner)

    def of_request(self, params: SamplingParams, owner: str = "") -> Future[Callable[[], TokenGrammar]]:
        """Returns a function that starts the constraint of a request, once it is compiled: at once if there
        is only a limit on reasoning."""
        started: Future[Callable[[], TokenGrammar]] = Future()
        if params.structured_outputs is None:
            started.set_result(lambda: with_budget(None, params))
            return started

        def compiled(grammar: Future[CompiledGrammar]) -> None:
            if (error := grammar.exception()) is not None:
                started.set_exception(error)
            else:
                started.set_result(lambda: with_budget(grammar.result().start(params), params))

        self.compile(params.structured_outputs, owner).add_done_callback(compiled)
        return started

    def check(self, params: StructuredOutputsParams, owner: str = "") -> Future[StructuredOutputsParams]:
        return self._checked.get(
            params, lambda: enforceable(params, lambda wanted: self.compile(wanted, owner).result()), owner
        )

    def backend(self) -> GrammarBackend:
        """Returns the backend, which the first caller creates; other callers wait for it."""
        with self._lock:
            backend = self._backend
            first = self._backend is None
            if backend is None:
                backend = self._backend = uncancellable()
        if first:
            resolve(backend, lambda: GrammarBackend(self._tokens()))
        return backend.result()

    def close(self) -> None:
        self._compiled.close()
        self._checked.close()
