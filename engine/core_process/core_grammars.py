"""The grammars of an engine core: compiled before their requests are queued, and enforced step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from engine.config.engine_config import ModelConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request
from engine.core.token_grammar import TokenGrammar
from engine.errors import RequestError
from engine.structured_output.backend import TokenTable
from engine.structured_output.bitmask_filler import BitmaskFiller
from engine.structured_output.compiler import GrammarCompiler
from engine.structured_output.token_files import table_of_files
from engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class CoreGrammars:
    """Compiles on separate threads; all other methods are called under the core's lock."""

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        *,
        compiled: Callable[[Request, TokenGrammar], None],
        failed: Callable[[Request, str], None],
    ) -> None:
        """``compiled`` or ``failed`` is called once for each request, on any thread; not after ``close``."""
        self._compiler = GrammarCompiler(
            lambda: table_of_files(model, vocab_size) or TokenTable.of(Tokenizer.load(model), vocab_size)
        )
        self._masks = BitmaskFiller(self._compiler, vocab_size)
        self._compiled = compiled
        self._failed = failed
        self._closed = False

    def compile(self, request: Request) -> None:
        """Start to compile the request's grammar, if it has one; until then it waits outside the queue."""
        params = request.sampling_params
        if not params.constrained:
            return
        owner = (request.job and request.job.owner) or ""
        try:
            compiled = self._compiler.of_request(params, owner)
        except Exception as error:
            compiled = Future()
            compiled.set_exception(error)
        compiled.add_done_callback(partial(self._take, request))

    def _take(self, request: Request, compiled: Future[Callable[[], TokenGrammar]]) -> None:
        if self._closed:
            return
        try:
            grammar = compiled.result()()
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("Compiling the grammar of request %s failed.", request.request_id)
            self._failed(request, str(error))
            return
        self._compiled(request, grammar)

    def reserve(self, plan: SchedulerOutput, sampled: Mapping[str, TokenGrammar]) -> None:
        """Reserve bitmasks for the plan, if grammars are ``sampled`` in it."""
        if sampled:
            plan.masks = self._masks.reserve()

    def fill(self, plan: SchedulerOutput, sampled: Mapping[str, TokenGrammar]) -> None:
        """Start to fill the bitmasks of a plan; all tokens sampled before it must be known."""
        assert plan.masks is not None, "they were reserved"
        self._masks.fill(plan.masks, sampled, plan.scheduled_spec_decode_tokens)

    def close(self) -> None:
        """Compile nothing more, and cancel the bitmasks that are awaited."""
        self._closed = True
        self._compiler.close()
        self._masks.close()
