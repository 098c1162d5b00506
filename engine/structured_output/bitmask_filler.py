"""Fills the bitmasks of a step on a thread of its own while the model runs the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.core.outputs import NO_MASKS, TokenMasks
from engine.core.token_grammar import TokenGrammar
from engine.row_failures import processing_failed
from engine.structured_output.backend import GrammarBackend, MatcherGrammar
from engine.structured_output.compiler import GrammarCompiler

logger = logging.getLogger(__name__)


def _one_by_one(backend: GrammarBackend, grammars: Mapping[str, MatcherGrammar]) -> TokenMasks:
    """The masks one by one, after a failure: which grammar failed, and the masks of the others."""
    rows: list[npt.NDArray[np.bool_]] = []
    failed: dict[str, str] = {}
    for request_id, grammar in grammars.items():
        try:
            rows.append(backend.forbidden([grammar])[0])
        except Exception as error:
            failed[request_id] = processing_failed("The grammar", error)
            rows.append(np.zeros(backend.vocab_size, dtype=np.bool_))
    logger.error("Requests ended because their grammar failed: %s", failed)
    return TokenMasks(list(grammars), np.stack(rows), failed)


class BitmaskFiller:
    """The bitmasks of one step at a time. They are reserved when the step is scheduled, and filled
    once its grammars have accepted all tokens sampled before."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._promised: set[Future[TokenMasks]] = set()
        self._closed = False

    def reserve(self) -> Future[TokenMasks]:
        """A future for masks that ``fill`` will make, unless ``close`` comes first."""
        masks: Future[TokenMasks] = Future()
        self._promised.add(masks)
        masks.add_done_callback(self._promised.discard)
        return masks

    def fill(self, masks: Future[TokenMasks], grammars: Mapping[str, TokenGrammar]) -> None:
        """Start filling the masks of these grammars, by request id. None of them may be advanced
        until the masks are there."""
        if self._closed:  # a step that was in flight then may still come back
            masks.cancel()
        else:
            self._thread.submit(self._fill, masks, grammars)

    def _fill(self, masks: Future[TokenMasks], grammars: Mapping[str, TokenGrammar]) -> None:
        if not masks.set_running_or_notify_cancel():
            return
        try:
            masks.set_result(self._made(grammars))
        except BaseException as error:
            masks.set_exception(error)

    def _made(self, grammars: Mapping[str, TokenGrammar]) -> TokenMasks:
        if not grammars:
            return NO_MASKS
        followed = [grammar for grammar in grammars.values() if isinstance(grammar, MatcherGrammar)]
        assert len(followed) == len(grammars), "all grammars come from the compiler"
        backend = self._compiler.backend()
        try:
            return TokenMasks(list(grammars), backend.forbidden(followed))
        except Exception:
            return _one_by_one(backend, dict(zip(grammars, followed, strict=True)))

    def close(self) -> None:
        """Cancel the masks that are still awaited (CancelledError), also of steps that come back later.

        Not to be called at the same time as ``reserve`` or ``fill``.
        """
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for masks in list(self._promised):
            masks.cancel()
