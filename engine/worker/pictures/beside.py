"""Finds options that do not support pictures: with them, a model is served as text."""

from __future__ import annotations

from dataclasses import replace

from engine.config.engine_config import EngineConfig
from engine.process.process_log import start_log
from engine.worker.loading.model_folder import resolve_folder
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.pictures.folder import read_picture_folder
from engine.worker.pictures.step_pictures import StepPictures
from engine.worker.pictures.tower import VisionTower


def without_pictures_beside(config: EngineConfig) -> EngineConfig:
    """The config, without pictures if another option excludes them, which it logs."""
    options = config.model
    if read_picture_folder(resolve_folder(options.model), options) is None:
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
    start_log.info("Pictures are not read with %s so far.", reason)
    return replace(config, model=replace(options, max_pictures=0))


def open_step_pictures(tower: VisionTower | None, model: CausalModel) -> StepPictures | None:
    """The object that places pictures in a model's steps; None without a tower."""
    if tower is None:
        return None
    assert isinstance(model, Decoder), "load_tower() refuses others"
    return StepPictures(tower, model)
