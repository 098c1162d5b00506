"""Finds options that do not support pictures and audio: with them, a model is served as text."""

from __future__ import annotations

from dataclasses import replace

from engine.config.engine_config import EngineConfig
from engine.process.process_log import start_log
from engine.worker.loading.model_folder import resolve_folder
from engine.worker.media.audio_folder import read_audio_folder
from engine.worker.media.picture_folder import read_picture_folder
from engine.worker.media.step_media import StepMedia
from engine.worker.media.towers import Towers
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder


def without_media_beside(config: EngineConfig) -> EngineConfig:
    """The config, without pictures and audio if another option excludes them, which it logs."""
    options = config.model
    folder = resolve_folder(options.model)
    if read_picture_folder(folder, options) is None and read_audio_folder(folder, options) is None:
        return config
    speculative = config.speculative
    others = {
        "pipeline_parallel_size > 1": options.pipeline_parallel_size > 1,
        "distributed_executor_backend ray": options.distributed_executor_backend == "ray",
        "cores on other machines": config.parallel.data_parallel_size > config.parallel.num_local,
        "a drafter with weights": speculative is not None and speculative.has_weights,
        "model_impl transformers": options.model_impl == "transformers",
    }
    reason = next((name for name, is_set in others.items() if is_set), None)
    if reason is None:
        return config
    start_log.info("Pictures and audio are not read with %s so far.", reason)
    return replace(config, model=replace(options, max_pictures=0, max_clips=0))


def open_step_media(towers: Towers | None, model: CausalModel) -> StepMedia | None:
    """The object that places media in a model's steps; None without towers."""
    if towers is None:
        return None
    assert isinstance(model, Decoder), "load_towers() refuses others"
    return StepMedia(towers, model)
