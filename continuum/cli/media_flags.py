"""The flags of ``continuum serve`` for models that read pictures or audio."""

from __future__ import annotations

import argparse

from continuum.cli.flag_group import FlagGroup, defaults_of
from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.config.media import MediaConfig, media_limits


def add_media_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the allowed sources, the number and the size of pictures and clips."""
    group = FlagGroup(parser, "pictures and audio", MediaConfig, SchedulerConfig)
    group.add_names(
        "allowed_media_domains",
        "Hosts, as full names, from which pictures and clips at http and https URLs may be fetched; for a "
        "private address, list the address, too (default: none)",
        "HOST[,HOST]",
    )
    group.add(
        "mm_processor_cache_gb",
        "Shared memory for pictures and clips that no request uses now, in GiB for each API server process",
        float,
        "GIB",
    )
    defaults = defaults_of(ModelConfig)
    most = f"{defaults['max_pictures']} pictures, {defaults['max_clips']} clips"
    group.flags.add_argument(
        "--limit-mm-per-prompt",
        metavar="JSON",
        help=f'Maximum pictures and audio clips per prompt, as {{"image": 8, "audio": 2}} (default: {most})',
    )
    group.flags.add_argument(
        "--mm-processor-kwargs",
        metavar="JSON",
        help='Allowed sizes of pictures, as {"min_pixels": 3136, "max_pixels": 1003520}; other pictures are '
        "resized (default: as the model's folder says)",
    )
    group.flags.add_argument(
        "--language-model-only",
        action="store_true",
        help="Serve only the text part of a model that reads pictures or audio; same as limits of 0",
    )
    group.add_switch(
        "disable_chunked_mm_input",
        "End a step before a picture or clip of which it would compute only a part, unless the step begins "
        "with it; needs --max-num-batched-tokens of at least the tokens of the largest one",
    )


def media_limits_of(args: argparse.Namespace) -> dict[str, int]:
    """Returns the fields of ``ModelConfig`` that these flags set."""
    return media_limits(args.limit_mm_per_prompt, args.mm_processor_kwargs, args.language_model_only)
