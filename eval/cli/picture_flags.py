"""The flags of ``continuum serve`` for models that read pictures."""

from __future__ import annotations

import argparse

from engine.config import ModelConfig, SchedulerConfig
from engine.media.config import MediaConfig, picture_limits
from eval.cli.flag_group import FlagGroup, defaults_of


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the allowed sources, the number and the size of pictures."""
    group = FlagGroup(parser, "pictures", MediaConfig, SchedulerConfig)
    group.add_names(
        "allowed_media_domains",
        "Hosts that pictures at http and https URLs may be fetched from, each in full; one with a private "
        "address needs that named, too (default: none)",
        "HOST[,HOST]",
    )
    group.add(
        "mm_processor_cache_gb",
        "Shared memory for pixels of pictures that no request holds, in GiB for each API server process",
        float,
        "GIB",
    )
    most = defaults_of(ModelConfig)["max_pictures"]
    group.flags.add_argument(
        "--limit-mm-per-prompt",
        metavar="JSON",
        help=f'Most pictures of a prompt, as {{"image": 8}}; 0: serve the model as text (default: {most})',
    )
    group.flags.add_argument(
        "--mm-processor-kwargs",
        metavar="JSON",
        help='Sizes of pictures, as {"min_pixels": 3136, "max_pixels": 1003520}; others are resized '
        "(default: as the model's folder says)",
    )
    group.flags.add_argument(
        "--language-model-only",
        action="store_true",
        help="Serve only the text part of a model that reads pictures, as a limit of 0 does",
    )
    group.add_switch(
        "disable_chunked_mm_input",
        "Cut a step before a picture that does not fit whole into what is left of it, unless the step begins "
        "with the picture; needs --max-num-batched-tokens of the largest picture",
    )


def picture_limits_of(args: argparse.Namespace) -> dict[str, int]:
    """Returns the fields of ``ModelConfig`` that these flags set."""
    return picture_limits(args.limit_mm_per_prompt, args.mm_processor_kwargs, args.language_model_only)
