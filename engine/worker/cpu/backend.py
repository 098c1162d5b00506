"""The CPU backend: attention, model, batch and sampler over one KV pool."""

from __future__ import annotations

from typing import Any

import torch

from engine.config.engine_config import EngineConfig, ModelConfig
from engine.errors import RequestError
from engine.worker.attention.layer_places import LayerPlaces, num_groups
from engine.worker.attention.selection import select_attention
from engine.worker.cpu.compiled_decoder import with_compiled_steps
from engine.worker.cpu.input_batch import InputBatch
from engine.worker.cpu.model_runner import ModelRunner
from engine.worker.cpu.parts import parts_of
from engine.worker.cpu.rank_sampler import select_sampler
from engine.worker.cpu.resting import Resting
from engine.worker.drafts.loaded_drafter import PlacedDrafter
from engine.worker.kv_tiers.host_pool import HostTransfers
from engine.worker.loading.identity import Stamps
from engine.worker.loading.loader import LoadedModel
from engine.worker.lora.adapter_store import AdapterStore
from engine.worker.media.beside import open_step_media
from engine.worker.model_states import use_again
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.routing_recorder import RoutingRecorder
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.pooling.pooling_runner import PoolingRunner
from engine.worker.states.state_pool import StatePool
from engine.worker.step_runner import InlineRunner, StepRunner, ThreadedRunner


class CPUBackend:
    """A Backend: the only one on a CPU, and the fallback for a GPU without Triton."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: torch.Tensor,
        places: LayerPlaces,
        attention: str,
        config: EngineConfig,
        group: TensorParallelGroup,
        states: StatePool | None = None,
        drafter: PlacedDrafter | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """``attention``: from ``resolve_attention``. ``states``: the state pool, if the model has states.
        ``drafter``: a drafter with weights, if there is one."""
        self._drafter = drafter
        self._adapters = adapters
        memories = [pool] if states is None else [pool, states.memory]
        self._resting = Resting(config, loaded, memories, group)
        self._model_runner: ModelRunner | None = None
        self._states = states
        self._num_groups = num_groups(places)
        self._loaded: LoadedModel | None = loaded
        self._max_model_len = loaded.max_model_len
        self._vocab_size = loaded.vocab_size
        self._device = loaded.device
        self._config = config
        self._group = group
        self._media = open_step_media(loaded.towers, loaded.model)
        self.attention = select_attention(pool, attention, places)

    def runner(self, host_pool: HostTransfers | None) -> StepRunner:
        config = self._config
        batch = InputBatch(
            config.scheduler.max_num_seqs,
            self._max_model_len,
            config.cache.block_size,
            self._vocab_size,
            self._num_groups,
            samples=self._group.stage.is_last,
        )
        recorder = self._recorder()
        runner = self._model_runner = self._new_runner(
            self._model(with_routing=recorder is not None),
            self.attention,
            batch,
            select_sampler(
                config.model.seed,
                self._group,
                self._device,
                may_compile=config.model.attention_backend != "torch",
            ),
            self._device,
            host_pool,
            parts_of(
                states=self._states,
                adapters=self._adapters,
                media=self._media,
                recorder=recorder,
                drafter=None if self._drafter is None else self._drafter.put_to_work(batch),
                tap=None if self._drafter is None else self._drafter.tap,
            ),
        )
        ahead = config.scheduler.plans_ahead(self._device.type != "cpu") or self._group.stage.size > 1
        return ThreadedRunner(runner) if ahead else InlineRunner(runner)

    def _new_runner(self, *parts: Any) -> ModelRunner:
        pooler = None if self._loaded is None else self._loaded.pooler
        return ModelRunner(*parts) if pooler is None else PoolingRunner(pooler, *parts)

    def sleep(self, level: int) -> None:
        """See ``Resting``. Call ``check_alone`` first."""
        self._resting.sleep(level, self._take)

    def wake_up(self) -> None:
        self._resting.wake_up(self._take)

    def check_weights(self, folder: str) -> None:
        """Refuse a folder of another model before the current weights are discarded."""
        self.check_alone()
        self._resting.check_weights(folder)

    def has_weights(self) -> bool:
        return self._resting.has_weights

    def take_stamps(self) -> Stamps | None:
        """The stamps of the files from which weights were loaded since the last call; None if none were."""
        stamps = self._resting.stamps
        self._resting.stamps = None
        return stamps

    @property
    def served(self) -> ModelConfig:
        """The options of the model that is loaded, or that was loaded last."""
        return self._resting.options

    def update_weights(self, folder: str | None) -> None:
        """See ``Resting``. Call ``check_weights`` first."""
        self._resting.update_weights(folder, self._take)

    def check_alone(self) -> None:
        """Raise RequestError if more than the model and its KV depends on the weights."""
        config = self._config
        others = {
            "a drafter with weights": self._drafter is not None,
            "returned experts": config.model.enable_return_routed_experts,
            "experts shared by cores": self._group.peers.num_cores > 1,
        }
        for what, is_there in others.items():
            if is_there:
                raise RequestError(f"A model with {what} cannot sleep or take other weights yet.")

    def _take(self, loaded: LoadedModel | None) -> None:
        assert self._model_runner is not None, "it has run"
        self._model_runner.use_model(None)
        self._loaded = loaded
        if self._media is not None:
            self._media.use(*((None, None) if loaded is None else (loaded.towers, loaded.model)))
        if loaded is not None:
            use_again(loaded.model, self._states)
            if self._adapters is not None:
                self._adapters.attach(loaded.model)
            if isinstance(self._model_runner, PoolingRunner):
                self._model_runner.use_pooler(loaded.pooler)
            self._model_runner.use_model(self._model(with_routing=False))

    def _model(self, *, with_routing: bool) -> CausalModel:
        """The model that runs the steps: compiled, unless someone needs its experts or hidden states."""
        if self._drafter is not None and self._drafter.tap is not None:
            return self._drafter.tap
        assert self._loaded is not None
        model = self._loaded.model
        if with_routing:
            return model
        step = None if self._adapters is None else self._adapters.step
        return with_compiled_steps(model, self.attention, step)

    def _recorder(self) -> RoutingRecorder | None:
        """The recorder of the tokens' experts if they are to be returned, on the first rank. Compiled steps
        do not report experts."""
        config = self._config
        if not config.model.enable_return_routed_experts or self._group.rank:
            return None
        assert self._loaded is not None
        model = self._loaded.model
        assert isinstance(model, Decoder), "choose_routed_experts() refuses others"
        return RoutingRecorder(model, config.scheduler.max_num_batched_tokens)
