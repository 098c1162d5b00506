"""One model as the endpoints use it: its public names and defaults, and the parts that serve it.

It must not know HTTP, nor how a part does its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import time

from engine.api.config import ServerConfig
from engine.api.core_pulse import CorePulse
from engine.api.errors import ModelNotFoundError, ServerClosingError
from engine.api.generation import Generation
from engine.api.http.auth import ApiKeys
from engine.api.http.streams import Patience
from engine.api.identity import ClientIdentity, request_context
from engine.api.limits import Admission
from engine.api.processes.load_board import LoadBoard, Tally
from engine.api.processes.siblings import ALONE, Siblings
from engine.api.prompts import Prompts
from engine.async_llm import AsyncLLM
from engine.messages import RequestContext, ToolCall, TurnReceipt
from engine.metrics import Metrics
from engine.request_output import RequestOutput
from engine.sampling_params import SamplingParams
from engine.tool_parsers.formats import ReplyFormat


class ServedModel:
    """What a request needs of the engine."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, siblings: Siblings = ALONE) -> None:
        """``siblings``: the front-end processes that count what they have in hand together."""
        self.engine = engine
        self.config = config
        self.siblings = siblings
        self.name = config.served_model_names[0]
        self.names = config.served_model_names
        self.created = int(time())
        self.metrics = Metrics(self.name, engine.ready.max_model_len, shared_folder=siblings.folder)
        self.metrics.record_pool(engine.ready.block_size, engine.ready.num_gpu_blocks)
        engine.add_stats_listener(self.metrics.record)
        self._board = LoadBoard(siblings)
        owners = ApiKeys(config.access.api_keys).names
        self.admission = Admission(config.limits, self._board, self.metrics.record_rejection, owners)
        self.prompts = Prompts(
            engine.tokenizer, self.max_model_len, config, self.metrics.record_prefix_killer
        )
        self.generation = Generation(engine, self._board, config.limits.request_timeout_s)
        self.sse_keep_alive_s = config.limits.sse_keep_alive_interval or None
        self.pulse = CorePulse(engine, config.limits.core_silence_s, config.limits.core_step_s)
        self.reply_format = self._reply_format(config)
        self.gives_receipts = config.receipts

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.max_model_len

    @property
    def num_live(self) -> int:
        """Requests being generated, by all front-end processes."""
        return self._board.total(Tally.LIVE)

    def patience(self) -> Patience:
        """Of one request's answer, if that is a stream."""
        return Patience(self.sse_keep_alive_s)

    def count_viewers(self, number: int) -> None:
        """So many more look at the dashboard, or less."""
        self._board.add(Tally.VIEWERS, number)
        self.metrics.record_viewers(self._board.total(Tally.VIEWERS), time())

    # ---- what a request may say, and what holds where it says nothing ----

    def check_name(self, name: str | None) -> None:
        """A request without a model's name takes the one there is."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(name, self.names)

    def sampling_defaults(self) -> SamplingParams:
        return self.engine.generation_defaults.sampling_params()

    def default_max_tokens(self, num_prompt_tokens: int) -> int | None:
        """What the model's generation config sets, as far as there is room; None if it says nothing."""
        limit = self.engine.generation_defaults.max_tokens
        return None if limit is None else max(1, min(limit, self.max_model_len - num_prompt_tokens))

    def check_params(self, params: SamplingParams) -> None:
        """RequestError for what is out of its range: before a place is taken, or anything made, for it."""
        params.verify()
        params.verify_vocabulary(self.engine.ready.vocab_size)

    def context(self, headers: Mapping[str, str], said: ClientIdentity) -> RequestContext:
        """What goes with the request to the core, as its headers and its body say it."""
        return request_context(headers, said, parts_prefixes=self.config.access.parts_prefixes)

    def _reply_format(self, config: ServerConfig) -> ReplyFormat:
        tokenizer = self.engine.tokenizer
        template = config.chat_template or tokenizer.hf.chat_template
        return config.reply_format(None if template is None else str(template), tokenizer.special_tokens)

    # ---- what becomes of it ----

    async def close_turn(
        self, context: RequestContext, last: RequestOutput, calls: list[ToolCall]
    ) -> TurnReceipt | None:
        """A turn has ended, and these tools run now: the receipt for its client, if it is to have one."""
        receipt = await self.generation.close_turn(context, last, calls)
        if receipt is not None:
            self.metrics.record_receipt(receipt)
        return receipt if self.gives_receipts else None

    async def check_health(self) -> None:
        """EngineDeadError if the engine is dead, CoreStalledError if it stands still, ServerClosingError if
        no more requests are taken."""
        await self.engine.check_health()
        self.pulse.check()
        if self.admission.is_closed:
            raise ServerClosingError

    async def end_all(self) -> None:
        """End every request that is still running with an error, and take no more."""
        self.admission.close()
        await self.generation.end_all()
