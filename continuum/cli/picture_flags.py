"""The flags of ``continuum serve`` for models that read pictures."""

from __future__ import annotations

import argparse

from continuum.cli.flag_group import FlagGroup, defaults_of
from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.config.media import MediaConfig, picture_limits


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the allowed sources, the number and the size of pictures."""
    group = FlagGroup(parser, "pictures", MediaConfig, SchedulerConfig)
    group.add_names(
        "allowed_media_domains",
        "Hosts, as full names, from which pictures at http and https URLs may be fetched; for a private "
        "address, list the address, too (default: none)",
        "HOST[,HOST]",
    )
    group.add(
        "mm_processor_cache_gb",
        "Shared memory for pixels of pictures that no request uses now, in GiB for each API server process",
        float,
        "GIB",
    )
    most = defaults_of(ModelConfig)["max_pictures"]
    group.flags.add_argument(
        "--limit-mm-per-prompt",
        metavar="JSON",
        help=f'Maximum pictures per prompt, as {{"image": 8}}; 0: serve only text (default: {most})',
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
        help="Serve only the text part of a model that reads pictures; same as a limit of 0",
    )
    group.add_switch(
        "disable_chunked_mm_input",
        "End a step before a picture of which it would compute only a part, unless the step begins with the "
        "picture; needs --max-num-batched-tokens of at least the tokens of the largest picture",
    )


def picture_limits_of(args: argparse.Namespace) -> dict[str, int]:
    """Returns the fields of ``ModelConfig`` that these flags set."""
    return picture_limits(args.limit_mm_per_prompt, args.mm_processor_kwargs, args.language_model_only)
