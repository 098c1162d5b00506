"""Fills the bitmasks of a step on a thread of its own while the model runs the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.core.outputs import NO_MASKS, TokenMasks
from engine.core.token_grammar import TokenGrammar
from engine.row_failures import processing_failed
from engine.structured_output.backend import GrammarBackend, MatcherGrammar
from engine.structured_output.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

NO_DRAFTS: Mapping[str, Sequence[int]] = {}


def _one_by_one(backend: GrammarBackend, grammars: Sequence[tuple[str, MatcherGrammar]]) -> TokenMasks:
    """The masks one by one, after a failure: which grammar failed, and the masks of the others."""
    rows: list[npt.NDArray[np.bool_]] = []
    failed: dict[str, str] = {}
    for request_id, grammar in grammars:
        try:
            rows.append(backend.forbidden([grammar])[0])
        except Exception as error:
            failed[request_id] = processing_failed("The grammar", error)
            rows.append(np.zeros(backend.vocab_size, dtype=np.bool_))
    logger.error("Requests ended because their grammar failed: %s", failed)
    return TokenMasks([request_id for request_id, _ in grammars], np.stack(rows), failed)


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

    def fill(
        self,
        masks: Future[TokenMasks],
        grammars: Mapping[str, TokenGrammar],
        drafts: Mapping[str, Sequence[int]] = NO_DRAFTS,
    ) -> None:
        """Start filling the masks of these grammars, by request id, and those behind each draft. None of
        them may be advanced until the masks are there."""
        if self._closed:  # a step that was in flight then may still come back
            masks.cancel()
        else:
            self._thread.submit(self._fill, masks, grammars, drafts)

    def _fill(
        self,
        masks: Future[TokenMasks],
        grammars: Mapping[str, TokenGrammar],
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        if not masks.set_running_or_notify_cancel():
            return
        try:
            masks.set_result(self._made(grammars, drafts))
        except BaseException as error:
            masks.set_exception(error)

    def _made(self, grammars: Mapping[str, TokenGrammar], drafts: Mapping[str, Sequence[int]]) -> TokenMasks:
        if not grammars:
            return NO_MASKS
        backend = self._compiler.backend()
        followed: list[tuple[str, MatcherGrammar]] = []
        for request_id, grammar in grammars.items():
            assert isinstance(grammar, MatcherGrammar), "all grammars come from the compiler"
            followed.append((request_id, grammar))
            followed += [(request_id, copy) for copy in grammar.ahead(drafts.get(request_id, ()))]
        try:
            return TokenMasks([i for i, _ in followed], backend.forbidden([each for _, each in followed]))
        except Exception:
            return _one_by_one(backend, followed)

    def close(self) -> None:
        """Cancel the masks that are still awaited (CancelledError), also of steps that come back later.

        Not to be called at the same time as ``reserve`` or ``fill``.
        """
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for masks in list(self._promised):
            masks.cancel()
