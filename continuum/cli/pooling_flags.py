"""The flags of ``continuum serve`` for models that pool: embeddings, classes and scores."""

from __future__ import annotations

import argparse

from engine.config.pooling import RUNNERS


def add_pooling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the use of the model."""
    flags = parser.add_argument_group("pooling")
    flags.add_argument(
        "--runner",
        choices=RUNNERS,
        default="auto",
        help="What the model is used for: generate: text; pooling: embeddings, classes and scores; auto: as "
        "its folder says",
    )
    flags.add_argument(
        "--pooler-config",
        metavar="JSON",
        help='How a pooling model pools, such as {"pooling_type": "MEAN", "use_activation": false} '
        "(default: as its folder says)",
    )
    flags.add_argument(
        "--hf-overrides",
        metavar="JSON",
        help="Score pairs by the logits of tokens of a model that generates, as V1 does for Qwen3-Reranker: "
        "architectures, classifier_from_token, is_original_qwen3_reranker, method (default: none)",
    )
