"""The components of one API server process: the engine's client, and what requests share.

This module does not know HTTP or how a component works. The model selected by one request is a ``Model``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import time

from engine.api.config import ServerConfig
from engine.api.errors import ModelNotFoundError, ServerClosingError
from engine.api.http.access_log import current_record
from engine.api.http.auth import ApiKeys
from engine.api.http.streams import Patience
from engine.api.lora.adapter_names import AdapterNames
from engine.api.processes.server_group import ALONE, ServerGroup
from engine.api.processes.shared_load import SharedLoad, Tally
from engine.api.prompt.left_out import LeftOut
from engine.api.prompt.prompt_media import PromptMedia
from engine.api.prompt.prompts import Prompts
from engine.api.service.core_heartbeat import CoreHeartbeat
from engine.api.service.limits import Admission
from engine.api.service.model import Model
from engine.api.tenants.quotas import Quotas
from engine.api.turn.generation import Generation
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.pooling_inputs import PoolingInputs
from engine.frontend.request_output import RequestOutput
from engine.media.placeholders import Placeholders
from engine.media.reader import MediaReader, decodable
from engine.media.store import MediaLease
from engine.metrics.server_metrics import ServerMetrics
from engine.records.media import MediaModels
from engine.records.messages import RequestContext, ToolCall, TurnReceipt
from engine.records.sampling_params import SamplingParams
from engine.tool_parsers.formats import ReplyFormat


class Server:
    """Everything that endpoints share."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, siblings: ServerGroup = ALONE) -> None:
        """``siblings``: the API server processes that count their load together."""
        self.engine = engine
        self.config = config
        self.siblings = siblings
        lora = engine.config.lora
        modules = {} if lora is None else {module.name: module for module in lora.modules}
        self.adapters = AdapterNames(modules, siblings.folder)
        self.created = int(time())
        speculative = engine.config.speculative
        self.metrics = ServerMetrics(
            engine.config.parallel.data_parallel_size,
            self.name,
            engine.ready.max_model_len,
            shared_folder=siblings.folder,
            num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        )
        self.metrics.record_pool(engine.ready.block_size, engine.ready.num_gpu_blocks)
        engine.add_stats_listener(self.metrics.record)
        self._board = SharedLoad(siblings)
        self.keys = ApiKeys(config.access.api_keys)
        path = config.access.api_key_file
        self.quotas = None if path is None else Quotas(path, siblings, self.metrics.record_key_usage)
        """What the keys of a file may use; None without a file."""
        if self.quotas is not None:
            self.quotas.on_reload(
                lambda keys: self.keys.use({name: key.digest for name, key in keys.items()})
            )
        self.admission = Admission(
            config.limits,
            self._board,
            self.metrics.record_rejection,
            self.keys.names,
            None if self.quotas is None else self.quotas.meter,
            config.served_model_names,
        )
        self.media = _media_reader(engine.ready.media if engine.tokenizer.has_texts else None, config)
        """Reads the media of requests; None if the model is shown text only."""
        if self.media is not None:
            self.media.store.on_lookup = lambda found: self.metrics.record_media(is_known=found)
        self.reply_format = self._reply_format(config)
        tool_format = self.reply_format.tool_format
        self.prompts = Prompts(
            engine.tokenizer,
            self.max_model_len,
            config,
            self.metrics.record_volatile_text,
            None if self.media is None else Placeholders(engine.tokenizer, self.media.models),
            None if tool_format is None else tool_format.call_ids,
        )
        self.pooling_inputs = (
            None
            if engine.ready.pooling is None
            else PoolingInputs(engine.tokenizer, engine.ready, config.chat_template)
        )
        """Tokenizes for a pooling model; None if the model generates."""
        self.generation = Generation(engine, self._board, config.limits.request_timeout_s)
        self.heartbeat = CoreHeartbeat(engine, config.limits.core_silence_s, config.limits.core_step_s)

    @property
    def name(self) -> str:
        """The first name of the model."""
        return self.config.served_model_names[0]

    @property
    def sse_keep_alive_s(self) -> float | None:
        """Maximum silence of a stream in seconds; None means no limit."""
        return self.config.limits.sse_keep_alive_interval or None

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.max_model_len

    @property
    def num_live(self) -> int:
        """Number of running requests, over all API server processes."""
        return self._board.total(Tally.LIVE)

    def patience(self) -> Patience:
        """Returns the limits on how long one request's stream waits for its first output."""
        return Patience(self.sse_keep_alive_s)

    def count_viewers(self, number: int) -> None:
        """Changes the number of viewers of the dashboard."""
        self._board.add(Tally.VIEWERS, number)
        self.metrics.record_viewers(self._board.total(Tally.VIEWERS), time())

    # ---- validation and defaults ----

    @property
    def names(self) -> Sequence[str]:
        """The names that requests may use: the model's, and those of its adapters."""
        return (*self.config.served_model_names, *self.adapters.all())

    def model(self, name: str | None) -> Model:
        """Returns the model of that name, with its adapter if it names one; None means the first name.
        ModelNotFoundError for an unknown name."""
        if name is None or name in self.config.served_model_names:
            return Model(self, self.name, None)
        adapter = self.adapters.find(name)
        if adapter is None:
            raise ModelNotFoundError(name, self.names)
        return Model(self, name, adapter)

    def sampling_defaults(self) -> SamplingParams:
        return self.engine.generation_defaults.sampling_params()

    def default_max_tokens(self, num_prompt_tokens: int) -> int | None:
        """The default of the model's generation config, clamped to the rest of the context; None without
        one."""
        limit = self.engine.generation_defaults.max_tokens
        return None if limit is None else max(1, min(limit, self.max_model_len - num_prompt_tokens))

    def left_out(self) -> LeftOut:
        """Returns a collector for one request's content besides text, not read yet."""
        return LeftOut(None if self.media is None else PromptMedia(self.media))

    def media_lease(self) -> AbstractContextManager[MediaLease | None]:
        """Returns a lease that holds the media of one request while the context is open."""
        return nullcontext() if self.media is None else self.media.store.lease()

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError for a parameter out of range, before the request is admitted."""
        params.verify()
        params.verify_vocabulary(self.engine.ready.vocab_size)

    @property
    def enforces_texts(self) -> bool:
        """Whether a tool's text can be enforced when the model may choose."""
        return self.reply_format.enforces_texts

    def _reply_format(self, config: ServerConfig) -> ReplyFormat:
        tokenizer = self.engine.tokenizer
        template = config.chat_template or tokenizer.hf.chat_template
        return config.reply_format(None if template is None else str(template), tokenizer.special_tokens)

    # ---- life cycle ----

    async def close_turn(
        self, context: RequestContext, last: RequestOutput, calls: list[ToolCall]
    ) -> TurnReceipt | None:
        """Reports the end of a turn and the tools that run now; returns the receipt, if receipts are
        enabled."""
        receipt = await self.generation.close_turn(context, last, calls)
        if receipt is not None:
            self.metrics.record_receipt(receipt)
            if (record := current_record()) is not None:
                record.decided(receipt)
        return receipt if self.config.receipts else None

    async def check_health(self) -> None:
        """Raises EngineDeadError, CoreStalledError, or ServerClosingError while shutting down."""
        await self.engine.check_health()
        self.heartbeat.check()
        if self.admission.is_closed:
            raise ServerClosingError

    async def end_all(self) -> None:
        """Ends every running request with an error, and admits no more."""
        self.admission.close()
        await self.generation.end_all()

    def close(self) -> None:
        """Ends everything that this process has started for its requests."""
        if self.media is not None:
            self.media.close()


def _media_reader(models: MediaModels | None, config: ServerConfig) -> MediaReader | None:
    """Returns the reader of media; None if the model reads only text, or nothing can be decoded here."""
    models = decodable(models)
    return None if models is None else MediaReader(models, config.media)
