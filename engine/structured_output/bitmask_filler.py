"""Fills the bitmasks of a step on a separate thread while the model runs the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.core.outputs import NO_MASKS, TokenMasks
from engine.core.token_grammar import TokenGrammar
from engine.records.row_failures import processing_failed
from engine.structured_output.backend import GrammarBackend, MatcherGrammar
from engine.structured_output.compiler import GrammarCompiler
from engine.structured_output.thinking_budget import ThinkingBudget

Followed = MatcherGrammar | ThinkingBudget
Rows = npt.NDArray[np.bool_]
"""Array of forbidden tokens [num_grammars, vocab_size]."""

logger = logging.getLogger(__name__)

NO_DRAFTS: Mapping[str, Sequence[int]] = {}


def _one_by_one(
    backend: GrammarBackend, grammars: Sequence[tuple[str, MatcherGrammar]]
) -> tuple[Rows, dict[str, str]]:
    """Computes the masks one by one, after a failure; returns them and the grammars that failed, whose masks
    forbid nothing."""
    rows: list[npt.NDArray[np.bool_]] = []
    failed: dict[str, str] = {}
    for request_id, grammar in grammars:
        try:
            rows.append(backend.forbidden([grammar])[0])
        except Exception as error:
            failed[request_id] = processing_failed("The grammar", error)
            rows.append(np.zeros(backend.vocab_size, dtype=np.bool_))
    logger.error("Requests ended because their grammar failed: %s", failed)
    return np.stack(rows), failed


class BitmaskFiller:
    """The bitmasks of one step at a time. They are reserved when the step is scheduled, and filled once its
    grammars have accepted all tokens sampled before."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._promised: set[Future[TokenMasks]] = set()
        self._closed = False

    def reserve(self) -> Future[TokenMasks]:
        """Returns a future for masks that ``fill`` will compute, unless ``close`` comes first."""
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
        """Starts filling the masks of these grammars, by request id, and those after each draft. No grammar
        may be advanced until the masks are done."""
        if self._closed:  # a step that was in flight then may still return
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
        followed: list[tuple[str, Followed]] = []
        for request_id, grammar in grammars.items():
            assert isinstance(grammar, MatcherGrammar | ThinkingBudget), "all come from the compiler"
            each: list[Followed] = [grammar, *grammar.ahead(drafts.get(request_id, ()))]
            if any(one.matched is not None or one.only is not None for one in each):
                followed += [(request_id, one) for one in each]
        if not followed:
            return NO_MASKS
        forbidden, failed = self._matched(followed)
        for row, (_, grammar) in zip(forbidden, followed, strict=True):
            if grammar.only is not None:
                row[:] = True
                row[grammar.only] = False
        return TokenMasks([request_id for request_id, _ in followed], forbidden, failed)

    def _matched(self, followed: Sequence[tuple[str, Followed]]) -> tuple[Rows, dict[str, str]]:
        """Returns the masks, empty for those without a grammar of the library, and the grammars that
        failed."""
        matched = [(i, each.matched) for i, each in followed if each.matched is not None]
        if not matched:
            return np.zeros((len(followed), self._vocab_size), dtype=np.bool_), {}
        backend = self._compiler.backend()
        failed = dict[str, str]()
        try:
            rows = backend.forbidden([each for _, each in matched])
        except Exception:
            rows, failed = _one_by_one(backend, matched)
        if len(matched) == len(followed):
            return rows, failed
        forbidden = np.zeros((len(followed), self._vocab_size), dtype=np.bool_)
        forbidden[[each.matched is not None for _, each in followed]] = rows
        return forbidden, failed

    def close(self) -> None:
        """Cancels the pending masks (CancelledError), and those of steps that return later.

        Must not be called at the same time as ``reserve`` or ``fill``.
        """
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for masks in list(self._promised):
            masks.cancel()
